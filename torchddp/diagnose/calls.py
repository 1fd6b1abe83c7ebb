"""Records this process's torch.distributed calls: the current one of each thread, and the last ones of each group.

Written by the functions of `watched` on the calling threads, read by the hang monitor on its own. Each call is one
plain tuple, stored with a single operation that the GIL makes atomic, so no lock is needed.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchddp.diagnose import rank_state
from torchddp.diagnose.rank_state import CallState, GroupCalls

_KEPT = 64  # calls of a group, and operations started without waiting
_TOLD = 32  # of a group's calls, in a report
_TOLD_GROUPS = 16
_MAX_DEPTH = 200
WAIT = "wait"


class Call(NamedTuple):
    """One call. csrc/bindings/bind_calls.cpp makes plain tuples in this layout.

    Attributes:
        number: index among the group's collectives, from 1; 0 for point-to-point messages and other uncounted calls.
        function: its name in torch.distributed; `WAIT` for waiting for an operation started earlier.
        sizes, dtype: of the first tensor that all ranks have; None for other calls. Sizes are the bytes of int64s.
        detail: the root or peer as ("from", rank, rank in the group), a list of those, or for a wait, a weak reference
            to the work.
        code, at: the caller's code object and instruction.
        thread: the calling thread.
    """

    number: int
    function: str
    sizes: bytes | None
    dtype: torch.dtype | None
    detail: Any
    code: CodeType | None
    at: int
    thread: int
    log: GroupLog | None


class GroupLog:
    """A process group's calls. Keeps neither the group nor a tensor alive.

    Attributes:
        home: the job's group, whose ranks exchange reports on this one's calls.
        key: the group's name, the same on all ranks.
        title: its name in reports.
        ranks: its members' ranks in the job.
        count: its number of collectives so far.
        recent: the last ones, in the layout of `Call`.
    """

    __slots__ = ("count", "group", "home", "key", "ranks", "recent", "title")

    def __init__(self, group: dist.ProcessGroup, home: dist.ProcessGroup) -> None:
        self.group, self.home = weakref.ref(group), weakref.ref(home)
        self.key = str(c10d._world.pg_names[group])
        self.ranks = sorted(dist.get_process_group_ranks(group))
        described = group.group_desc if group.group_desc not in ("", "undefined") else self.key[:12]
        self.title = (
            'group "default"' if group is home else f'group "{described}" of {rank_state.ranks_text(self.ranks)}'
        )
        self.count = 0
        self.recent: deque[tuple[Any, ...]] = deque(maxlen=_KEPT)


# By thread: its current call, the outermost one if calls nest.
active: dict[int, tuple[Any, ...]] = {}
# By id of the group; the entry is removed when the group is destroyed.
logs: dict[int, GroupLog] = {}
# Operations started without waiting for them: weak references to the Work, and the call.
started: deque[tuple[weakref.ref[Any], tuple[Any, ...]]] = deque(maxlen=_KEPT)


def _forget_all() -> None:
    active.clear()  # of threads that don't exist in a forked child
    logs.clear()
    started.clear()


os.register_at_fork(after_in_child=_forget_all)


def open_log(group: object) -> GroupLog | None:
    """Open the log of a group at its first call; None for a group that torch does not know."""
    if not isinstance(group, dist.ProcessGroup) or group not in c10d._world.pg_map:
        return None
    log = GroupLog(group, dist.group.WORLD or group)
    key = id(group)
    weakref.finalize(group, logs.pop, key, None).atexit = False
    logs[key] = log
    return log


# --- the caller ---

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = str(Path(__file__).parent.parent) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = sysconfig.get_paths()["purelib"] + os.sep


@functools.cache
def _is_inner(file: str) -> bool:
    if file.startswith((_TORCH, _OWN, "<frozen")) or file.endswith("typing_extensions.py"):
        return True
    return file.startswith(_LIBRARY) and not file.startswith(_SITE)


# Files whose frames belong to the program, as seen so far.
outer_files: set[str] = set()


def outer_frame(frame: FrameType | None) -> FrameType | None:
    """The first frame outwards that belongs to the program; None on threads that run none of its code."""
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return None
        file = frame.f_code.co_filename
        if file in outer_files or not _is_inner(file):
            outer_files.add(file)
            return frame
        frame = frame.f_back
    return None


def caller() -> tuple[CodeType | None, int]:
    """The program's code and instruction from which the function that calls this was called."""
    frame = outer_frame(sys._getframe(2))
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


def _line_of(code: CodeType, at: int) -> int:
    for begin, end, line in code.co_lines():
        if begin <= at < end and line is not None:
            return line
    return code.co_firstlineno


# --- for the hang monitor ---


@dataclass(frozen=True, eq=False)
class Underway:
    """A call in progress."""

    noted: tuple[Any, ...]
    since_s: float

    @property
    def call(self) -> Call:
        return Call._make(self.noted)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since_s


class CallWaits:
    """The calls over one job's groups, as its monitor observes them from check to check."""

    def __init__(self, home: dist.ProcessGroup) -> None:
        self._home = weakref.ref(home)
        self._underway: dict[int, Underway] = {}

    def is_of(self, home: dist.ProcessGroup) -> bool:
        return self._home() is home

    def look(self) -> list[Underway]:
        """The current calls. Their start is only known to within one check, because calls don't read the clock."""
        seen: dict[int, Underway] = {}
        for thread, noted in list(active.items()):
            before = self._underway.get(thread)
            found = before if before is not None and before.noted is noted else Underway(noted, time.monotonic())
            if found.call.log is None or found.call.log.home() is self._home():
                seen[thread] = found
        self._underway = seen
        return list(seen.values())

    def states(self) -> list[CallState]:
        """The current calls, longest first."""
        states = [_state_of(underway) for underway in self.look()]
        return sorted(states, key=lambda state: -state.waited_s)

    def groups(self) -> dict[str, GroupCalls]:
        """The last calls by group; if there are many groups, those with the most calls."""
        ours = [log for log in list(logs.values()) if log.home() is self._home()]
        ours.sort(key=lambda log: -log.count)
        return {log.key: _calls_of(log) for log in ours[:_TOLD_GROUPS]}


def _calls_of(log: GroupLog) -> GroupCalls:
    recent = [Call._make(call) for call in list(log.recent)[-_TOLD:]]
    told = [[call.number, call.function, *_place_of(call), shape_text(call)] for call in recent]
    return GroupCalls(log.title, log.ranks, log.count, told)


def _state_of(underway: Underway) -> CallState:
    call = underway.call
    waits_at: tuple[str, int] | None = None
    if call.function == WAIT:
        work = call.detail()
        of_work = next((Call._make(begun) for ref, begun in list(started) if work is not None and ref() is work), None)
        if of_work is not None:
            waits_at, call = _place_of(call), of_work
    file, line = _place_of(call)
    return CallState(
        function=call.function,
        file=file,
        line=line,
        shape=shape_text(call),
        group=call.log.key if call.log is not None else "",
        number=call.number,
        peers=_peers_of(call),
        waits_at=waits_at,
        waited_s=underway.waited_s,
        thread=underway.call.thread,
    )


def _place_of(call: Call) -> tuple[str, int]:
    return ("", 0) if call.code is None else (call.code.co_filename, _line_of(call.code, call.at))


def shape_text(call: Call) -> str:
    """'float32[3, 4]'; empty without a tensor."""
    if call.sizes is None:
        return ""
    sizes = memoryview(call.sizes).cast("q")
    return f"{str(call.dtype).removeprefix('torch.')}[{', '.join(map(str, sizes))}]"


def _peers_of(call: Call) -> list[tuple[str, int]]:
    return list(_pairs_of(call)) if call.function != WAIT else []


def _pairs_of(call: Call) -> Iterator[tuple[str, int]]:
    """('to', 3) or ('from', 3) with ranks of the job; -1: any rank."""
    of_one = isinstance(call.detail, tuple)
    for direction, rank, group_rank in [call.detail] if of_one else call.detail or ():
        if rank is None and group_rank is not None and call.log is not None:
            group = call.log.group()
            rank = dist.get_global_rank(group, group_rank) if group is not None else None
        yield direction, -1 if rank is None else int(rank)
