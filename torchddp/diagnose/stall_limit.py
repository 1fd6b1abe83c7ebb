"""When waiting ranks report: the user's number, the environment's, or one that fits the timeout."""

from __future__ import annotations

import math
import os

ENV = "TORCHDDP_STALL_REPORT_S"
DEFAULT_S = 60.0


def check(stall_report_s: object) -> None:
    """ValueError or TypeError unless it is None or a number of seconds, 0 or more."""
    if stall_report_s is None:
        return
    if isinstance(stall_report_s, bool) or not isinstance(stall_report_s, int | float):
        raise TypeError(
            f"stall_report_s must be a number of seconds, or None; got {type(stall_report_s).__name__} "
            f"{stall_report_s!r}"
        )
    if not math.isfinite(stall_report_s) or stall_report_s < 0:
        raise ValueError(
            f"stall_report_s must be a finite number of seconds, 0 (no reports) or more; got {stall_report_s}"
        )


def choose(stall_report_s: float | None, timeout_s: float) -> float:
    """The seconds that hold; 0: no reports.

    Args:
        stall_report_s: the user's; None: the environment variable TORCHDDP_STALL_REPORT_S, or else the lesser of 60 and
            a third of the timeout.
        timeout_s: how long a reduction may take, at which its waits end anyhow.

    Raises:
        ValueError: one that was given is not below the timeout, or the variable holds no number of seconds.
    """
    source = "stall_report_s"
    if stall_report_s is None and (text := os.environ.get(ENV)):
        source = ENV
        try:
            stall_report_s = float(text)
            check(stall_report_s)
        except ValueError:
            raise ValueError(
                f"the environment variable {ENV} must hold seconds, 0 (no reports) or more; got {text!r}"
            ) from None
    if stall_report_s is None:
        return min(DEFAULT_S, timeout_s / 3)
    if stall_report_s >= timeout_s:
        raise ValueError(
            f"{source} is {stall_report_s:g} s, but a reduction fails after {timeout_s:g} s (`timeout`, or the process "
            "group's own): no report would come before that. Take a smaller one, 0 for none, or a longer timeout."
        )
    return float(stall_report_s)
