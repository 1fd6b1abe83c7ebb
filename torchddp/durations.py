"""Durations in public arguments: seconds, or a ``datetime.timedelta``."""

from __future__ import annotations

import datetime
import math

Duration = float | datetime.timedelta


def seconds(value: Duration | None, name: str) -> float | None:
    """`value` in seconds; None stays None.

    Raises:
        TypeError: it is neither a number nor a timedelta. `name` is the argument's name, for the message.
        ValueError: it is negative or NaN.
    """
    if value is None:
        return None
    if isinstance(value, datetime.timedelta):
        length = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        length = float(value)
    else:
        raise TypeError(
            f"{name} must be a number of seconds, a datetime.timedelta or None; got {value!r} ({type(value).__name__})"
        )
    if math.isnan(length) or length < 0:
        raise ValueError(f"{name} must be at least 0 seconds; got {value!r}")
    return length


def timedelta_of(value: Duration | None, name: str) -> datetime.timedelta | None:
    """`value` as a timedelta, at most ``timedelta.max``; None stays None. Raises what :func:`seconds` raises."""
    length, longest = seconds(value, name), datetime.timedelta.max
    if length is None:
        return None
    if isinstance(value, datetime.timedelta):
        return value
    return datetime.timedelta(seconds=length) if length < longest.total_seconds() else longest
