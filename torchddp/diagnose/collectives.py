"""The calls of torch.distributed that this rank's threads are in, found on their stacks.

Note [Calls on a stack]
~~~~~~~~~~~~~~~~~~~~~~~
A call that hangs stays on its thread's stack, so the hang monitor looks at the stacks now and then; torch's functions
stay as they are, and a call costs nothing. A frame identifies a call only as long as it exists: a loop's next call may
get a frame at the same address. Holding the frame would settle that, but would also keep its tensors alive. So a frame
is held only once a call seems to have lasted for half the limit, and the call is certain when it is found again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchddp import _torch
from torchddp.diagnose.rank_state import CallState, frames_of_threads, part_of, programs_line, ranks_text

_FUNCTIONS = distributed_c10d.__file__


class Call:
    def __init__(self, thread: int, frame: FrameType) -> None:
        self.thread = thread
        self.key = (thread, id(frame))
        self._code = frame.f_code
        self.since_s = time.monotonic()  # when it was first found
        self.is_certain = False
        self._held: FrameType | None = None

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since_s

    def is_in(self, frame: FrameType) -> bool:
        if self._held is not None:
            return frame is self._held
        return (id(frame), frame.f_code) == (self.key[1], self._code)

    def make_certain(self, frame: FrameType) -> None:
        """Hold the frame in which the call was found, or note that it has been found again since."""
        self._held, self.is_certain = frame, self._held is not None


class CallWatch:
    """Used by one thread."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}

    def look(self, limit_s: float) -> list[Call]:
        """The current calls. Those that last for this limit become certain in time."""
        found = self._look()
        for call, frames in found:
            if call.waited_s >= limit_s / 2:
                call.make_certain(frames[0])
        return [call for call, _ in found]

    def states(self) -> list[CallState]:
        return sorted((_state_of(call, frames) for call, frames in self._look()), key=lambda state: -state.waited_s)

    def forget(self) -> None:
        self._calls.clear()

    def _look(self) -> list[tuple[Call, list[FrameType]]]:
        """Each call with the frames from its function outwards."""
        stacks = {thread: found for thread, frames in frames_of_threads().items() if (found := _from_function(frames))}
        before, self._calls = self._calls, {}
        for thread, (frame, *_) in stacks.items():
            call = before.get(thread)
            self._calls[thread] = call if call is not None and call.is_in(frame) else Call(thread, frame)
        return [(self._calls[thread], frames) for thread, frames in stacks.items()]


def _from_function(frames: list[FrameType]) -> list[FrameType]:
    """The stack from the function of torch.distributed that the program's innermost frame has called; [] if none."""
    found = None
    for index, frame in enumerate(frames):
        file = frame.f_code.co_filename
        if file == _FUNCTIONS:
            found = index
        elif part_of(file) == "user":
            break
    return [] if found is None else frames[found:]


def _state_of(call: Call, frames: list[FrameType]) -> CallState:
    place = programs_line((frame.f_code.co_filename, frame.f_lineno or 0) for frame in frames)
    values = frames[0].f_locals
    group = values.get("group")
    title, ranks = title_of(group) if isinstance(group, dist.ProcessGroup) else ("", [])
    return CallState(frames[0].f_code.co_name, *place, title, ranks, _peer_of(values, ranks), call.waited_s, *call.key)


def _peer_of(values: Mapping[str, Any], ranks: list[int]) -> int:
    peers = [values.get(name) for name in ("src", "dst")]
    in_group = [values.get(name) for name in ("group_src", "group_dst")]
    peers += [rank if rank is None or not ranks else ranks[rank] for rank in in_group]
    return next((peer for peer in peers if isinstance(peer, int)), -1)


def title_of(group: dist.ProcessGroup) -> tuple[str, list[int]]:
    """The group's title and ranks; ('', []) for the default group, and for one that has been destroyed."""
    name = "" if group is dist.group.WORLD else _torch.name_of(group)
    if not name:
        return "", []
    ranks = sorted(dist.get_process_group_ranks(group))
    title = group.group_desc if group.group_desc not in ("", "undefined") else name[:12]
    return f'group "{title}" of {ranks_text(ranks)}', ranks
