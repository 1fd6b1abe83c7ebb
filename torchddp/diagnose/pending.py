"""Collectives that this rank has begun and that have not ended, from torch's Flight Recorder.

Some waits have no function of torch.distributed on their thread's stack: `wait()` of an asynchronous call, functional
collectives, and therefore DTensor and compiled graphs, and calls from C++. gloo records each collective, with the stack
that it was called on, until it has ended. Reading the record takes milliseconds, and a collective may last because
the program computes meanwhile. So the record is read only once the training thread has stood still, and not in
backward, where reductions of buckets are meant to be pending.
"""

from __future__ import annotations

import time
from types import CodeType
from typing import Any

import torch.distributed as dist

from torchddp import _torch
from torchddp.diagnose.collectives import title_of
from torchddp.diagnose.rank_state import CallState, frames_of_threads, is_in_backward, programs_line, stack_of, training


class PendingWatch:
    """Used by one thread."""

    def __init__(self) -> None:
        self._place: tuple[int, CodeType, int] | None = None  # a run of a function, and the instruction in it
        self._since_s = 0.0

    def look(self, limit_s: float) -> list[CallState]:
        """The training thread's oldest collective, once it has stood still for half of this limit."""
        if not self._stands_still() or time.monotonic() - self._since_s < limit_s / 2:
            return []
        found = self._oldest()
        if not found:
            self._since_s = time.monotonic()  # it computes; the record is not read again for a while
        return found

    def states(self) -> list[CallState]:
        """The same, once it has stood still since the last look."""
        return self._oldest() if self._stands_still() else []

    def _stands_still(self) -> bool:
        before, self._place = self._place, None
        frames = frames_of_threads().get(training.thread)
        if frames and not is_in_backward(stack_of(training.thread)):
            self._place = id(frames[0]), frames[0].f_code, frames[0].f_lasti
        if self._place is not None and self._place == before:
            return True
        self._since_s = time.monotonic()
        return False

    def _oldest(self) -> list[CallState]:
        groups = _torch.groups_by_name()
        found = [
            _state_of(entry, groups[entry["process_group"][0]])
            for entry in _torch.flight_record()
            if not entry["retired"] and entry["process_group"][0] in groups
        ]
        found = [state for state in found if state.thread == training.thread]
        return sorted(found, key=lambda state: -state.waited_s)[:1]


def _state_of(entry: dict[str, Any], group: dist.ProcessGroup) -> CallState:
    """A collective, and the line of the program that began it."""
    place = programs_line((frame["filename"], frame["line"]) for frame in entry["frames"])
    function = entry["profiling_name"].partition(":")[2]
    waited_s = (time.time_ns() - entry["time_created_ns"]) / 1e9
    thread, number = int(entry["thread_id"]), entry["record_id"]
    return CallState(function, *place, *title_of(group), -1, waited_s, thread, number)
