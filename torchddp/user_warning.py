"""Warnings that point at the user's line, however deep below it they are found."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

__all__ = ["warn_user"]

_NOT_THE_USERS = (str(Path(__file__).parent) + "/", str(Path(torch.__file__).parent) + "/")


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn``, as if it stood in the innermost line that belongs neither to this package nor to torch."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
