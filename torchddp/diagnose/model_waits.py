"""A model's waits for other ranks, for the hang monitor. Runs on the watcher's thread."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

import torch.distributed as dist

from torchddp import _torch
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose.rank_state import RankState
from torchddp.transport import processes

# Number of models so far, by process group; equal on all ranks.
_models: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class ModelWaits:
    """The waits of one model, which it does not keep alive. ``stall_s``: how long until the other ranks are asked."""

    def __init__(self, session: ReducerSession, stall_s: float) -> None:
        self.stall_s = stall_s
        self._session: ReducerSession = weakref.proxy(session)
        group = session.process_group
        number = _models[group] = _models.get(group, -1) + 1
        self.key = f"{_torch.name_of(group)}/{number}"
        self._members = dist.get_process_group_ranks(group) if _torch.is_alive(group) else list(range(group.size()))
        self._rank = session.rank

    @property
    def is_gone(self) -> bool:
        """Whether the model was destroyed."""
        return self._status() is None

    @property
    def since_s(self) -> float | None:
        """When it began to wait for other ranks, in seconds of the monotonic clock; None if it does not wait."""
        status = self._status()
        return time.monotonic() - status["waited_s"] if status is not None and status["phase"] == "waiting" else None

    def describe(self, state: RankState, asked: str) -> None:
        """Add its part to this rank's state: of several models, the one asked about, or else one that waits or has done
        more steps.
        """
        status = self._status()
        if status is None:
            return
        own = (self.key == asked, status["phase"] == "waiting", status["step"])
        if state.model and own <= (state.model == asked, state.waits, state.step):
            return
        state.model, state.members = self.key, self._members
        state.take_status(status)

    def set_peers(self, known: dict[int, dict[str, Any]]) -> None:
        """Learn the processes of more ranks: the model's transport errors then say which of them are gone."""
        here = [(rank, who) for rank, who in known.items() if rank in self._members and processes.is_here(who)]
        peers = [(self._members.index(rank), who["pid"], who["started"]) for rank, who in here]
        with contextlib.suppress(ReferenceError):
            self._session.reducer.set_peers([peer for peer in peers if peer[0] != self._rank])

    def fail_with(self, found: str) -> None:
        """Attach a report's headline to later errors."""
        with contextlib.suppress(ReferenceError):
            self._session.reducer.note_failure(found)

    def _status(self) -> dict[str, Any] | None:
        """The reducer's status, or None if the model was destroyed."""
        with contextlib.suppress(ReferenceError):
            return self._session.reducer.status()
        return None
