"""After a step: updated parameters on their way from their owners to all ranks."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch

from torchddp import _C
from torchddp.errors import TransportError
from torchddp.sharded.flat_parameters import Chunk


class ParameterGather:
    """One message for each chunk, from its owner's memory straight into that of the others.

    All messages are started at once, in the same order on all ranks; each is waited for when its parameters are needed.
    """

    def __init__(self, chunks: Sequence[Chunk], transport: _C.Transport, timeout: datetime.timedelta) -> None:
        self.chunks = list(chunks)
        self._transport = transport
        self._timeout = timeout
        self._works = [transport.make_work() for _ in self.chunks]
        self._under_way: set[int] = set()
        self._reducer: _C.Reducer | None = None
        self.own_memory = [chunk.flat for chunk in self.chunks if chunk.owner == transport.rank]
        self._received = [p for chunk in self.chunks if chunk.owner != transport.rank for p in chunk.params]

    def tell(self, reducer: _C.Reducer) -> None:
        """From now on this reducer's reports say when this rank waits here."""
        self._reducer = reducer

    def start(self) -> None:
        """Collective, not blocking."""
        if self._transport.size == 1:
            return
        self.finish()
        for chunk in self.chunks:
            chunk.take_in()
        # A graph that saved the old values must not be run backward: autograd then says so.
        torch.autograd.graph.increment_version(self._received)
        for index, chunk in enumerate(self.chunks):
            try:
                self._transport.broadcast(chunk.wire, chunk.owner, self._works[index])
            except TransportError as error:
                raise self._failure(index, error) from error
            self._under_way.add(index)

    def wait(self, indices: Iterable[int]) -> None:
        """Until the parameters of these chunks may be read (and this rank's own changed)."""
        for index in indices:
            if index not in self._under_way:
                continue
            self._under_way.discard(index)
            if self._reducer is not None:
                self._reducer._begin_wait("updated parameters of other ranks")
            try:
                self._works[index].wait(self._timeout)
            except TransportError as error:
                raise self._failure(index, error) from error
            finally:
                if self._reducer is not None:
                    self._reducer._end_wait()

    def finish(self) -> None:
        """Until all of them may."""
        self.wait(range(len(self.chunks)))

    def _failure(self, index: int, error: Exception) -> TransportError:
        for work in self._works:
            work.abandon()
        self._under_way.clear()
        chunk = self.chunks[index]
        return TransportError(
            f"rank {self._transport.rank}: message {index} of {len(self.chunks)} with updated parameters "
            f"({len(chunk.params)} of rank {chunk.owner}, {chunk.wire.numel()} bytes) failed: {error}\n"
            "A peer has died, left, or did not reach this step in time. "
            "Look at the other ranks' logs for the first error."
        )
