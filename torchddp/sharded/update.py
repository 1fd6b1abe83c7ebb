"""How updated parameters get from their owners to all ranks."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from torchddp import _C
from torchddp.errors import TransportError
from torchddp.optim.own_memory import OwnMemory
from torchddp.rank_problems import ADVICE_FOR_A_LOST_PEER
from torchddp.sharded.flat_parameters import Chunk


class Update(ABC):
    """Of one optimizer's parameters, in chunks."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        own_memory: Sequence[OwnMemory],
        transport: _C.Transport,
        timeout: datetime.timedelta,
    ) -> None:
        self.chunks = list(chunks)
        # Where this rank's parameters are stepped.
        self.own_memory = list(own_memory)
        self._transport = transport
        self._timeout = timeout
        self._reducer: _C.Reducer | None = None
        self._received = [p for chunk in self.chunks if chunk.owner != transport.rank for p in chunk.params]

    def tell(self, reducer: _C.Reducer) -> None:
        """From now on this reducer's reports say when this rank waits here."""
        self._reducer = reducer

    @abstractmethod
    def begin(self) -> None:
        """Collective: this rank's own memory may be changed on return."""

    @abstractmethod
    def start(self) -> None:
        """Collective, not blocking: this rank has changed its own."""

    @abstractmethod
    def wait(self, indices: Iterable[int]) -> None:
        """Until the parameters of these chunks may be read."""

    @abstractmethod
    def finish(self) -> None:
        """Until all of them may."""

    def _take_in(self) -> None:
        for chunk in self.chunks:
            chunk.take_in()

    def _mark_received(self) -> None:
        # A graph that saved the old values must not be run backward: autograd then says so.
        torch.autograd.graph.increment_version(self._received)

    def _wait_for(self, work: _C.Work, what: str) -> None:
        if self._reducer is None:
            work.wait(self._timeout)
            return
        number = self._reducer._begin_wait(what)
        try:
            work.wait(self._timeout)
        finally:
            self._reducer._end_wait(number)

    def _error(self, what: str, error: Exception) -> TransportError:
        return TransportError(f"rank {self._transport.rank}: {what} failed: {error}\n{ADVICE_FOR_A_LOST_PEER}")
