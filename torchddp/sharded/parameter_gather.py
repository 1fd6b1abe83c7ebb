"""After a step: updated parameters on their way from their owners to all ranks."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch

from torchddp import _C
from torchddp.errors import TransportError
from torchddp.optim.own_memory import OwnMemory
from torchddp.sharded.flat_parameters import Chunk, ChunkPlan
from torchddp.sharded.update import Update


class ParameterGather(Update):
    """One message for each chunk, from its owner's memory straight into that of the others.

    All messages are started at once, in the same order on all ranks; each is waited for when its parameters are needed.
    """

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        params: Sequence[torch.Tensor],
        transport: _C.Transport,
        timeout: datetime.timedelta,
    ) -> None:
        chunks = [Chunk(plan, params, _flat_memory(plan, params, transport)) for plan in plans]
        mine = [OwnMemory(chunk.flat, chunk.flat) for chunk in chunks if chunk.owner == transport.rank]
        super().__init__(chunks, mine, transport, timeout)
        self._take_in()
        self._wires = [chunk.flat.view(torch.uint8) for chunk in chunks]  # as bytes: no backend has all dtypes
        self._works = [transport.make_work() for _ in chunks]
        self._under_way: set[int] = set()

    def begin(self) -> None:
        """This rank's own memory may be changed."""
        self.finish()

    def start(self) -> None:
        """Collective, not blocking."""
        self.finish()
        self._take_in()
        self._mark_received()
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
                    self._wait_for(self._works[index], "updated parameters of other ranks")
                except TransportError as error:
                    raise self._failure(index, error) from error

    def finish(self) -> None:
        """Until all of them may."""
        self.wait(range(len(self.chunks)))

    def _failure(self, index: int, error: Exception) -> Exception:
        for work in self._works:
            work.abandon()
        self._under_way.clear()
        chunk = self.chunks[index]
        return self._error(
            f"message {index} of {len(self.chunks)} with updated parameters ({len(chunk.params)} of rank "
            f"{chunk.owner}, {self._wires[index].numel()} bytes)",
            error,
        )


def _flat_memory(plan: ChunkPlan, params: Sequence[torch.Tensor], transport: _C.Transport) -> torch.Tensor:
    first = params[plan.params[0]].detach()
    if plan.owner == transport.rank and not transport.reaches_any_memory:
        flat = transport.allocate(plan.numel, first)  # where the others can read it
    else:
        flat = torch.empty(plan.numel, dtype=first.dtype, device=first.device)
    return flat.zero_()  # gaps travel too
