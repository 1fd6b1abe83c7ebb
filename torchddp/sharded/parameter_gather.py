"""After a step: updated parameters on their way from their owners to all ranks."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch

from torchddp import _C
from torchddp.errors import ADVICE_FOR_A_LOST_PEER, TransportError
from torchddp.sharded.flat_parameters import Chunk, ChunkPlan


class ParameterGather:
    """One message for each chunk of an optimizer's parameters, from its owner's memory straight into the others'.

    All messages are started at once, in the same order on all ranks; each is waited for when its parameters are needed.
    """

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        params: Sequence[torch.Tensor],
        transport: _C.Transport,
        timeout: datetime.timedelta,
    ) -> None:
        self.chunks = [Chunk(plan, params, _flat_memory(plan, params, transport)) for plan in plans]
        self.own_memory = [chunk.flat for chunk in self.chunks if chunk.owner == transport.rank]
        self._transport = transport
        self._timeout = timeout
        self._reducer: _C.Reducer | None = None
        self._received = [p for chunk in self.chunks if chunk.owner != transport.rank for p in chunk.params]
        self._take_in()
        self._wires = [chunk.flat.view(torch.uint8) for chunk in self.chunks]  # as bytes: no backend has all dtypes
        self._works = [transport.make_work() for _ in self.chunks]
        self._under_way: set[int] = set()

    def tell(self, reducer: _C.Reducer) -> None:
        """From now on this reducer's reports say when this rank waits here."""
        self._reducer = reducer

    def start(self) -> None:
        """Collective, not blocking."""
        self.finish()
        self._take_in()
        # A graph that saved the old values must not be run backward: autograd then says so.
        torch.autograd.graph.increment_version(self._received)
        for index, chunk in enumerate(self.chunks):
            try:
                self._transport.broadcast(self._wires[index], chunk.owner, self._works[index])
            except TransportError as error:
                raise self._failure(index, error) from error
            self._under_way.add(index)

    def wait(self, indices: Iterable[int]) -> None:
        """Until the parameters of these chunks may be read (and this rank's own changed)."""
        for index in indices:
            if index in self._under_way:
                self._under_way.discard(index)
                try:
                    self._wait_for(self._works[index])
                except TransportError as error:
                    raise self._failure(index, error) from error

    def finish(self) -> None:
        """Until all of them may."""
        self.wait(range(len(self.chunks)))

    def _take_in(self) -> None:
        for chunk in self.chunks:
            chunk.take_in()

    def _wait_for(self, work: _C.Work) -> None:
        if self._reducer is None:
            work.wait(self._timeout)
            return
        number = self._reducer.begin_wait("updated parameters of other ranks")
        try:
            work.wait(self._timeout)
        finally:
            self._reducer.end_wait(number)

    def _failure(self, index: int, error: Exception) -> TransportError:
        for work in self._works:
            work.abandon()
        self._under_way.clear()
        chunk = self.chunks[index]
        return TransportError(
            f"rank {self._transport.rank}: message {index} of {len(self.chunks)} with updated parameters "
            f"({len(chunk.params)} of rank {chunk.owner}, {self._wires[index].numel()} bytes) failed: {error}\n"
            f"{ADVICE_FOR_A_LOST_PEER}"
        )


def _flat_memory(plan: ChunkPlan, params: Sequence[torch.Tensor], transport: _C.Transport) -> torch.Tensor:
    first = params[plan.params[0]].detach()
    if plan.owner == transport.rank and not transport.reaches_any_memory:
        flat = transport.allocate(plan.numel, first)  # where the others can read it
    else:
        flat = torch.empty(plan.numel, dtype=first.dtype, device=first.device)
    return flat.zero_()  # gaps travel too
