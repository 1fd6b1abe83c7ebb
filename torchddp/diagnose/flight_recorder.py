"""Writes the ranks' states of a hang report as files of torch's Flight Recorder, which `torchfrtrace` reads.

Note [Sequence numbers]
~~~~~~~~~~~~~~~~~~~~~~~
torchfrtrace compares what ranks did under the same number in a group. Those that c10d counts don't fit: gloo counts
messages too, so the ranks of a group count differently, and torchddp's own transports count nothing. A report knows
only what each rank waits in now, so all calls on a group have number 1, and all reductions of a model that of the step.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchddp.diagnose.diagnosis import Finding
from torchddp.diagnose.rank_state import CallState, Frame, RankState

FOLDER_ENV = "TORCHDDP_FLIGHT_RECORDER_DIR"
_VERSION = "2.10"  # of the format
# Operations that torchfrtrace knows; names that contain others come first.
_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "gather", "scatter", "reduce")
_OPERATIONS = (*_COLLECTIVES, "barrier", "send", "recv")
_DEFAULT = "default_pg"
_UNKNOWN_SIZES = [[0]]  # torchfrtrace compares numbers of elements, so these fit each other


class Group(NamedTuple):
    name: str
    ranks: tuple[int, ...]


class Waiting(NamedTuple):
    """A wait of one rank as torchfrtrace sees it: an operation with a number in a group."""

    group: Group
    number: int
    operation: str
    waited_s: float
    frames: list[Frame]


def write_traces(states: list[RankState], finding: Finding) -> Path | None:
    """Write a file for each rank to a new folder in TORCHDDP_FLIGHT_RECORDER_DIR; None if it isn't set or writable.

    torchfrtrace compares all ranks with the first whose file it finds, and blames those that differ. It searches
    subfolders last, so culprits have one. Only this user can read the files: they reveal details of the program.
    """
    parent = os.environ.get(FOLDER_ENV)
    if not parent:
        return None
    culprits = {culprit.rank for culprit in finding.culprits}
    is_apart = len(culprits) < len(states)
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path(tempfile.mkdtemp(prefix=f"torchddp-hang-{stamp}-step{finding.step}-", dir=parent))
        (folder / "culprits").mkdir()
        for rank, trace in traces(states, time.time_ns()).items():
            file = folder / ("culprits" if is_apart and rank in culprits else "") / f"rank_{rank}"
            file.touch(mode=0o600)
            file.write_bytes(pickle.dumps(trace))
    except OSError:
        return None
    return folder


def traces(states: list[RankState], at_ns: int) -> dict[int, dict[str, Any]]:
    """Each rank's file. A rank that doesn't wait has no entries: torchfrtrace then reports that it is missing."""
    world = tuple(state.rank for state in states)
    waits = {state.rank: list(_waits(state, world)) for state in states}
    groups = {wait.group for found in waits.values() for wait in found} | {Group(_DEFAULT, world)}
    config = {name: {"name": name, "desc": name, "ranks": str(list(ranks))} for name, ranks in sorted(groups)}
    return {
        rank: {
            "version": _VERSION,
            "pg_config": config,
            "pg_status": {},
            "entries": [_entry(index, wait, at_ns) for index, wait in enumerate(found)],
        }
        for rank, found in waits.items()
    }


def _waits(state: RankState, world: tuple[int, ...]) -> Iterator[Waiting]:
    stack = state.stack[::-1]
    if state.waits:
        group = Group(f"model {state.model}", tuple(state.members))
        if state.bucket >= 0:
            operation = f"all_reduce of bucket {state.bucket} of {state.num_buckets}"
        else:
            operation = f"barrier for {state.waits_for}"
        yield Waiting(group, state.step, operation, state.waited_s, stack)
    call = state.call
    if call is not None:
        group = Group(call.group, tuple(call.ranks)) if call.group else Group(_DEFAULT, world)
        operation = _operation(call, group.ranks, state.rank)
        if operation:
            frames = stack if call is state.training_call else [Frame(call.file, call.line, call.function, "user")]
            yield Waiting(group, 1, operation, call.waited_s, frames)


def _operation(call: CallState, ranks: tuple[int, ...], rank: int) -> str:
    """'' if torchfrtrace has no name for it: `new_group`, and `recv` from any rank."""
    name = next((name for name in _OPERATIONS if name in call.function), "")
    if name in ("send", "recv"):
        if call.peer not in ranks:
            return ""
        return f"{name} {ranks.index(rank)}{'->' if name == 'send' else '<-'}{ranks.index(call.peer)}"
    return name if name in ("", call.function) else f"{name} by {call.function}"


def _entry(index: int, wait: Waiting, at_ns: int) -> dict[str, Any]:
    return {
        "record_id": index,
        "op_id": index,
        "pg_id": 0,
        "process_group": (wait.group.name, wait.group.name),
        "collective_seq_id": wait.number,
        "p2p_seq_id": 0,
        "is_p2p": wait.operation.startswith(("send", "recv")),
        "profiling_name": f"gloo:{wait.operation}",
        "input_sizes": _UNKNOWN_SIZES,
        "output_sizes": _UNKNOWN_SIZES,
        "input_dtypes": [],
        "output_dtypes": [],
        "state": "started",
        "time_created_ns": at_ns - int(wait.waited_s * 1e9),
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 0,
        "frames": [{"name": frame.function, "filename": frame.file, "line": frame.line} for frame in wait.frames],
    }
