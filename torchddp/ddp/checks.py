"""What a model watches for while it trains: `Checks`, the argument ``checks`` of DistributedDataParallel."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Final, Literal

from torchddp.durations import Duration, seconds
from torchddp.errors import check_flag

RAISE: Final = "raise"
ENV = "TORCHDDP_CHECKS"
STALL_ENV = "TORCHDDP_STALL_REPORT_S"
_DEFAULT_STALL_S = 60.0


@dataclass(frozen=True)
class Checks:
    """What a model watches for while it trains. The values are checked by the class that gets them, on all ranks.

    Args:
        nonfinite: look for infinities and NaNs in this rank's own gradients while they are packed; see
            ``DistributedDataParallel.nonfinite``. ``"raise"``: also raise FloatingPointError on all ranks at the end of
            a backward with non-finite averages (not with ``join()``; on a CUDA device backward then waits).
        parameters_every: before the forward of every n-th synchronized step, compare the parameters of all ranks by a
            hash (collective); a difference raises :class:`torchddp.DesyncError` on all. Stops once ``join()`` was used.
            None: never. See :func:`torchddp.check_parameters`.
        stall_report: how long a reduction may wait, in seconds or as a timedelta, before the ranks exchange their
            positions through the process group's store and one of them logs why they are stuck
            (``docs/hang_reports.md``). 0: no reports. None: the environment variable TORCHDDP_STALL_REPORT_S, or else
            the smaller of 60 s and a third of the timeout. Each rank's own.
        gradient_stats: statistics of every reduced bucket: ``DistributedDataParallel.gradient_stats``. Each rank's own.
        zero_weights: what happens in a weighted step in which every rank's weight is 0. ``"raise"``: ValueError on all
            ranks at the end of backward (on a CUDA device, backward then waits). ``"zeros"``: gradients are zeros.
        traps: warn about gradients that only some ranks change, and parameters that the reducer doesn't see
            (``docs/checks.md``). Each rank's own.
        stragglers: log on rank 0 which rank makes the others wait, and where its time goes (``docs/stragglers.md``).
            Each rank's own; nothing is compared while one of them has it off.
    """

    nonfinite: bool | Literal["raise"] = False
    parameters_every: int | None = None
    stall_report: Duration | None = None
    gradient_stats: bool = False
    zero_weights: Literal["raise", "zeros"] = RAISE
    traps: bool = True
    stragglers: bool = True

    def check(self) -> None:
        """TypeError or ValueError for a value that is not allowed."""
        for name in ("gradient_stats", "traps", "stragglers"):
            check_flag(f"Checks({name}=)", getattr(self, name))
        if self.nonfinite not in (False, True, RAISE):
            raise ValueError(f'Checks(nonfinite=) must be False, True or "raise", got {self.nonfinite!r}')
        if self.zero_weights not in (RAISE, "zeros"):
            raise ValueError(f'Checks(zero_weights=) must be "raise" or "zeros", got {self.zero_weights!r}')
        every = self.parameters_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"Checks(parameters_every=) must be a number of steps, 1 or more, or None; got {every!r}")
        asked_for_s = seconds(self.stall_report, "Checks(stall_report=)")
        if asked_for_s is not None and math.isinf(asked_for_s):
            raise ValueError("Checks(stall_report=) must be a finite number of seconds; 0 turns reports off")

    @property
    def reports_stalls(self) -> bool:
        """Whether hang reports are not turned off here; the environment may still do so."""
        return self.stall_report is None or bool(self.stall_report)

    def stall_limit_s(self, timeout_s: float) -> float:
        """Seconds of waiting after which ranks report why; 0: never. ValueError if not below ``timeout_s``."""
        asked_for_s, source = seconds(self.stall_report, "Checks(stall_report=)"), "Checks(stall_report=)"
        if asked_for_s is None and (text := os.environ.get(STALL_ENV)):
            asked_for_s, source = _variable_s(text), STALL_ENV
        if asked_for_s is None:
            return min(_DEFAULT_STALL_S, timeout_s / 3)
        if asked_for_s >= timeout_s:
            raise ValueError(
                f"{source} is {asked_for_s:g} s, but a reduction fails after {timeout_s:g} s (`timeout`, or the "
                "process group's own), before any report. Use a smaller value, 0 for no reports, or a longer timeout."
            )
        return asked_for_s


# Nothing is watched: no thread, no exchange, no look at the parameters.
OFF: Final = Checks(stall_report=0, zero_weights="zeros", traps=False, stragglers=False)

ChecksChoice = Checks | Literal["off"] | None


def chosen(checks: ChecksChoice) -> Checks:
    """What the argument and the environment ask for. TypeError or ValueError for what is not allowed."""
    variable = os.environ.get(ENV, "")
    if variable not in ("", "0", "1"):
        raise ValueError(f"the environment variable {ENV} must be 0 (no checks), or 1 or empty, got {variable!r}")
    if checks is not None and checks != "off" and not isinstance(checks, Checks):
        raise TypeError(
            f'checks must be a torchddp.Checks, "off" or None, got {checks!r}. None selects the '
            "default checks; to choose others, pass, for example, torchddp.Checks(nonfinite=True)"
        )
    if checks == "off" or variable == "0":
        return OFF
    found = checks or Checks()
    found.check()
    return found


def _variable_s(text: str) -> float:
    try:
        value = float(text)
        if not 0 <= value < math.inf:
            raise ValueError
    except ValueError:
        raise ValueError(f"{STALL_ENV} must hold seconds, 0 (no reports) or more; got {text!r}") from None
    return value
