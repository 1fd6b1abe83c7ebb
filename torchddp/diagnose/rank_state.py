"""What a rank reports about itself when something hangs: its step, calls, process and stack."""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any, NamedTuple

import torch

from torchddp import _C

# Value of `RankState.phase`: the rank answers but has no such model.
NO_MODEL = "no model"

_TORCH = str(Path(torch.__file__).parent) + "/"
_OWN = str(Path(__file__).parent.parent) + "/"
_PYTHON = sysconfig.get_paths()["stdlib"] + "/"
_MAX_FRAMES = 100
_USER_FRAMES = 5

_MAX_CHARS = 2000
_PROGRAM, _THREAD = "the program", "its thread"
ENDS = (_PROGRAM, _THREAD)  # an exception's "where" after which nothing continues
# By thread, with its time; None for what ended the program. Lock-free, since a fork could copy a held lock.
_noted: dict[int | None, tuple[float, dict[str, Any]]] = {}

# The training thread: the last one that wrapped a model or ran a forward.
training = SimpleNamespace(thread=threading.main_thread().ident or 0)


class Frame(NamedTuple):
    """One frame; ``part`` is 'torch', 'torchddp', 'python' (its library) or 'user'. Lists of these go through JSON."""

    file: str
    line: int
    function: str
    part: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass
class CallState:
    """A call of torch.distributed that has not returned: its function, the program's line that made it ('' if it was
    made on a library's thread), its group's title and ranks (empty: the default group), and the rank it was given as
    source or destination (-1: none).

    ``waited_s``: since it was first seen. ``thread``, ``frame``: ids that distinguish calls.
    """

    function: str
    file: str
    line: int
    group: str
    ranks: list[int]
    peer: int
    waited_s: float
    thread: int
    frame: int

    @property
    def identity(self) -> tuple[int, int]:
        return self.thread, self.frame

    def __str__(self) -> str:
        place = f"at {Path(self.file).name}:{self.line}" if self.file else "on a library's thread"
        return f"{self.function} {place}" + (f" ({self.group})" if self.group else "")


@dataclass
class RankState:
    """One rank at one moment. All but the first four are empty for a rank that has not answered.

    Attributes:
        who: its process (`process_identity`), or None if it never reported it.
        left: why it no longer takes part, if it posted a reason.
        model, members: the key of the model that steps and waits refer to ('' if it has none), and its group's ranks.
        step: number of synchronized forwards begun.
        phase: 'idle', 'forward', 'backward' or 'waiting'; 'no model'; '' if it has not answered.
        armed: its forward has ended and gradients are to be reduced.
        waits_for, bucket, waited_s: what it waits in, for which bucket (-1: none), for how many seconds.
        missing: by bucket index, the parameters without a gradient in this step.
        error: the message of its reducer's last failed step.
        exception, stack, thread: of the training thread (`last_exception`).
        calls: its calls of torch.distributed, longest wait first.
    """

    rank: int
    who: dict[str, Any] | None = None
    left: str = ""
    alive: str = ""  # 'running', or as in transport/waits.py; '' if no rank could check
    model: str = ""
    members: list[int] = field(default_factory=list)
    step: int = 0
    phase: str = ""
    armed: bool = False
    waits_for: str = ""
    bucket: int = -1
    num_buckets: int = 0
    waited_s: float = 0.0
    missing: dict[int, list[str]] = field(default_factory=dict)
    error: str = ""
    exception: dict[str, Any] | None = None
    stack: list[Frame] = field(default_factory=list)
    calls: list[CallState] = field(default_factory=list)
    thread: int = 0

    @property
    def answered(self) -> bool:
        return bool(self.phase)

    @property
    def waits(self) -> bool:
        return self.phase == "waiting"

    @property
    def longest_call_s(self) -> float:
        return max((call.waited_s for call in self.calls), default=0.0)

    @property
    def longest_wait_s(self) -> float:
        """In a reduction or a call."""
        return max(self.waited_s if self.waits else 0.0, self.longest_call_s)

    def has_moved(self, now: RankState) -> bool:
        if (now.model, now.step) != (self.model, self.step):
            return True
        if self.waits and (now.phase, now.waits_for, now.bucket) != (self.phase, self.waits_for, self.bucket):
            return True
        # Only the longest calls count: others may come and go in unrelated threads.
        lasting = {call.identity for call in self.calls if call.waited_s >= self.longest_call_s / 2}
        return not lasting <= {call.identity for call in now.calls}

    @property
    def training_call(self) -> CallState | None:
        return next((call for call in self.calls if call.thread == self.thread), None)

    @property
    def call(self) -> CallState | None:
        """The call it is in: the training thread's, or whatever has lasted longest."""
        return self.training_call or next(iter(self.calls), None)

    def take_status(self, status: dict[str, Any]) -> None:
        for name, value in status.items():
            if name != "buckets":
                setattr(self, name, value)
        self.missing = {i: bucket["missing"] for i, bucket in enumerate(status["buckets"]) if bucket["missing"]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankState:
        """The state whose `asdict` went through JSON."""
        inner = {
            "missing": {int(i): names for i, names in values["missing"].items()},
            "stack": [Frame(*frame) for frame in values["stack"]],
            "calls": [CallState(**call) for call in values["calls"]],
        }
        return cls(**{**values, **inner})


def ranks_text(ranks: list[int]) -> str:
    """'rank 3', 'ranks 0-2 and 5'."""
    # Successive ranks are equally far from their places in the list.
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda at: at[1] - at[0])]
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(r) for r in run])]
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {joined}"


def stack_of(thread_id: int) -> list[Frame]:
    """Innermost last; empty if there is no such thread."""
    codes = [(frame.f_code, frame.f_lineno or 0) for frame in reversed(frames_of_threads().get(thread_id, []))]
    return [Frame(code.co_filename, line, code.co_name, part_of(code.co_filename)) for code, line in codes]


def frames_of_threads() -> dict[int, list[FrameType]]:
    """Innermost first. Walking another thread's stack in Python may crash: csrc/bindings/bind_process.cpp."""
    return _C.stacks(_MAX_FRAMES)


@functools.cache
def part_of(file: str) -> str:
    """Whose code a source file is: 'torch', 'torchddp', 'python' (its library) or 'user'."""
    if file.startswith(_OWN):
        return "torchddp"
    if file.startswith((_TORCH, "<eval_with_key>")) or "/torchinductor_" in file:  # compiled graphs, too
        return "torch"
    if file.endswith("/typing_extensions.py"):  # wraps torch's deprecated functions
        return "python"
    return "python" if file.startswith((_PYTHON, "<frozen")) and "site-packages" not in file else "user"


def programs_line(lines: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """The first of these files and lines that is the program's own; ('', 0) if none is."""
    return next((line for line in lines if part_of(line[0]) == "user"), ("", 0))


def is_in_backward(stack: list[Frame]) -> bool:
    return any(frame.function == "_engine_run_backward" and frame.part == "torch" for frame in stack)


def user_part(stack: list[Frame]) -> list[Frame]:
    return [frame for frame in stack if frame.part == "user"][-_USER_FRAMES:]


# --- training's last exception, as text ---


def note_exception(error: BaseException, where: str) -> None:
    """Remember an exception that leaves training in this thread; keeps no frame alive. ``where``: like "forward"."""
    _noted[None if where == _PROGRAM else threading.get_ident()] = (time.monotonic(), _describe(error, where))


def last_exception(thread_id: int) -> dict[str, Any] | None:
    """``{"type", "message", "where", "stack", "age_s"}`` of a thread's last exception, or None. Thread-safe.

    One being handled now comes first; one that ended the program counts for every thread.
    """
    handled = _handled_now(thread_id)
    if handled is not None:
        return {**_describe(handled, "handled"), "age_s": 0.0}
    found = [noted for noted in (_noted.get(thread_id), _noted.get(None)) if noted is not None]
    if not found:
        return None
    noted_at_s, exception = max(found, key=lambda noted: noted[0])
    return {**exception, "age_s": time.monotonic() - noted_at_s}


@functools.cache
def note_uncaught() -> None:
    """Once per process: also record exceptions that end the interpreter or a thread; existing hooks run after."""
    hook_before, thread_hook_before = sys.excepthook, threading.excepthook

    def in_program(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        try:
            note_exception(error, _PROGRAM)
        finally:
            hook_before(kind, error, where)

    def in_thread(args: threading.ExceptHookArgs) -> None:
        try:
            if args.exc_value is not None:
                note_exception(args.exc_value, _THREAD)
        finally:
            thread_hook_before(args)

    sys.excepthook, threading.excepthook = in_program, in_thread


def _handled_now(thread_id: int) -> BaseException | None:
    current: Any = sys._current_exceptions().get(thread_id)
    if isinstance(current, tuple):  # before Python 3.12: as sys.exc_info()
        current = current[1]
    # Not those that normally end a loop or the process.
    return None if isinstance(current, StopIteration | SystemExit) else current


def _describe(error: BaseException, where: str) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": str(error)[:_MAX_CHARS],
        "where": where,
        "stack": [[at.filename, at.lineno, at.name] for at in traceback.extract_tb(error.__traceback__)],
    }
