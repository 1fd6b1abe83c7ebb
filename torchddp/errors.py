"""torchddp's own exceptions, its usage warning, records of non-finite gradients, and checks of arguments."""

from __future__ import annotations

import contextlib
import numbers
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from torchddp._C import InternalError as InternalError
from torchddp._C import TransportError as TransportError

_NOT_THE_USERS = (str(Path(__file__).parent) + "/", str(Path(torch.__file__).parent) + "/", contextlib.__file__)


class UsageWarning(UserWarning):
    """Probably a mistake in the training program, which continues; see docs/checks.md. Issued once per model."""

    __module__ = "torchddp"  # its public path


class DesyncError(RuntimeError):
    """Parameters that should be equal on all ranks differ. Raised on all ranks.

    Attributes:
        step: number of finished synchronized steps.
        parameter: name of the first parameter that differs, in registration order; None if their number differs.
        ranks: those whose value differs from the majority, or from rank 0 if there is no majority.
        num_parameters: how many parameters differ.
        max_difference: the largest finite difference between elements of that parameter; None if unknown.
    """

    __module__ = "torchddp"  # its public path

    def __init__(
        self,
        message: str,
        step: int,
        parameter: str | None,
        ranks: tuple[int, ...],
        num_parameters: int,
        max_difference: float | None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.parameter = parameter
        self.ranks = ranks
        self.num_parameters = num_parameters
        self.max_difference = max_difference

    def __reduce__(self) -> tuple[object, ...]:
        details = (self.step, self.parameter, self.ranks, self.num_parameters, self.max_difference)
        return type(self), (self.args[0], *details)


@dataclass(frozen=True)
class NonFinite:
    """A gradient of one rank that was not finite before averaging."""

    step: int  # synchronized forwards, counted from 1
    rank: int
    parameter: str
    count: int | None  # infinite or NaN elements (parts of complex ones); None on a device, where they are not counted

    def __str__(self) -> str:
        values = "" if self.count is None else f" ({self.count} value{'s' if self.count != 1 else ''})"
        return f"'{self.parameter}'{values}"


def check_flag(name: str, value: object, *, may_be_none: bool = False) -> None:
    """TypeError for anything but booleans and what equals one, which torch's class takes as well."""
    if not (value is None and may_be_none) and value not in (0, 1):
        raise TypeError(f"{name} must be True{', False or None' if may_be_none else ' or False'}, got {value!r}")


def check_count(name: str, value: object, least: int, unit: str = "") -> None:
    """TypeError unless the value is an integer, ValueError if it is below `least`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, at least {least}{unit}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{unit}, got {value}")


def check_number(name: str, value: object, is_allowed: Callable[[float], bool], words: str) -> None:
    """TypeError unless the value is a real number, ValueError unless it is allowed; `words` say which are."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number {words}, got {value!r}")
    if not is_allowed(float(value)):
        raise ValueError(f"{name} must be {words}, got {value}")


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that an unknown ``name`` may stand for."""
    import difflib  # here, because it takes longer to import than all else in this module

    known = {candidate.lower(): candidate for candidate in names}
    text = name.lower().replace("-", "_")
    close = difflib.get_close_matches(text, list(known), n=1)
    close = close or [candidate for candidate in known if len(text) > 2 and text in candidate]
    return known[close[0]] if close else None


def listed(items: Sequence[object], most: int = 4) -> str:
    """'a, b, c, d and 2 more'."""
    more = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {more} more" if more > 0 else "")


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Like ``warnings.warn``, attributed to the innermost line that belongs neither to this package nor to torch."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
