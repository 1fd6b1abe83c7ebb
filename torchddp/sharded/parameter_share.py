"""Parameters of which the ranks of a host have one copy together, until one of them changes something for itself.

Owners step parameters in memory that all ranks see (`_C.Replicated`): nobody copies anything after a step, and the host
holds each parameter once. What a rank changes in its parameters otherwise is its own, as ever: at the next step its
owner's changes count, and those of the others are gone.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

import torch

from torchddp import _C
from torchddp.errors import TransportError
from torchddp.optim.own_memory import OwnMemory
from torchddp.sharded.flat_parameters import ALIGNMENT_BYTES, Chunk, ChunkPlan, views_of
from torchddp.sharded.update import Update


class ParameterShare(Update):
    """Two meetings a step: when all ranks have come to it, and when all have made theirs."""

    def __init__(
        self,
        plans: Sequence[ChunkPlan],
        params: Sequence[torch.Tensor],
        replicated: _C.Replicated,
        transport: _C.Transport,
        timeout: datetime.timedelta,
    ) -> None:
        offsets, _ = place_chunks(plans, params, transport.size)
        chunks, mine = [], []
        for plan, offset in zip(plans, offsets, strict=True):
            first = params[plan.params[0]]
            chunk = Chunk(plan, params, replicated.seen(plan.owner, offset, plan.numel, first))
            chunks.append(chunk)
            if plan.owner == transport.rank:
                masters = replicated.masters(offset, plan.numel, first)
                with torch.no_grad():
                    for place, param in zip(views_of(plan, params, masters), chunk.params, strict=True):
                        place.copy_(param)
                mine.append(OwnMemory(chunk.flat, masters))
        super().__init__(chunks, mine, transport, timeout)
        self._replicated = replicated
        self._work = transport.make_work()
        self._is_meeting = False
        self._meet()
        self._await_others("the parameters of other ranks")
        self._take_in()

    def begin(self) -> None:
        """Nobody reads the old values any more."""
        self.finish()
        self._take_in()
        self._meet()
        self._await_others("other ranks to begin the optimizer's step")
        self._replicated.publish()

    def start(self) -> None:
        """Collective, not blocking."""
        self._take_in()
        self._mark_received()
        self._meet()

    def wait(self, indices: Iterable[int]) -> None:
        """Until all parameters may be read."""
        if self._is_meeting:
            self._await_others("updated parameters of other ranks")
            self._replicated.refresh()

    def finish(self) -> None:
        """Until all parameters may be read."""
        self.wait(())

    def _meet(self) -> None:
        try:
            self._transport.barrier(self._work)
        except TransportError as error:
            raise self._error("sharing parameters", error) from error
        self._is_meeting = True

    def _await_others(self, what: str) -> None:
        self._is_meeting = False
        try:
            self._wait_for(self._work, what)
        except TransportError as error:
            self._work.abandon()
            raise self._error(f"sharing parameters: waiting for {what}", error) from error


def place_chunks(
    plans: Sequence[ChunkPlan], params: Sequence[torch.Tensor], world_size: int
) -> tuple[list[int], list[int]]:
    """Where each chunk begins in its owner's memory, and how much each rank's takes, in bytes. Pure."""
    ends = [0] * world_size
    begins = []
    for plan in plans:
        begins.append(ends[plan.owner])
        size = plan.numel * params[plan.params[0]].itemsize
        ends[plan.owner] += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return begins, ends
