"""The Python stack of a thread, and what of it a user wants to read."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = str(Path(torch.__file__).parent) + "/"
_OWN = str(Path(__file__).parent.parent) + "/"
_PYTHON = sysconfig.get_paths()["stdlib"] + "/"
_MAX_FRAMES = 100
USER_FRAMES = 5


class Frame(NamedTuple):
    """One frame; ``part`` is 'torch', 'torchddp', 'python' (its library) or 'user'. Lists of these go through JSON."""

    file: str
    line: int
    function: str
    part: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def of_thread(thread_id: int) -> list[Frame]:
    """Innermost last; empty if there is no such thread."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    found: list[Frame] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        file = frame.f_code.co_filename
        found.append(Frame(file, frame.f_lineno or 0, frame.f_code.co_name, _part(file)))
        frame = frame.f_back
    return found[::-1]


def _part(file: str) -> str:
    if file.startswith(_OWN):
        return "torchddp"
    if file.startswith(_TORCH):
        return "torch"
    return "python" if file.startswith((_PYTHON, "<")) and "site-packages" not in file else "user"


def user_part(stack: list[Frame]) -> list[Frame]:
    """The innermost frames that are the user's own."""
    return [frame for frame in stack if frame.part == "user"][-USER_FRAMES:]


def collective(stack: list[Frame]) -> str | None:
    """'all_reduce, called from train.py:88', if the thread is in a collective of torch.distributed now."""
    name, caller = None, None
    for frame in reversed(stack):
        if frame.part == "user":
            caller = frame
            break
        if frame.file.endswith("torch/distributed/distributed_c10d.py"):
            name = frame.function
    if name is None:
        return None
    return f"{name}, called from {Path(caller.file).name}:{caller.line}" if caller else name
