"""Observations of a trial, by its ranks and by the launcher. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.chaos.plan import Trial


@dataclass
class StepRecord:
    """The gradients after one `backward()` that raised nothing."""

    step: int
    digest: str  # of their bytes
    expected_digest: str  # by the simulation
    deviation: float  # largest difference, relative to the largest element


@dataclass
class Footprint:
    """The machine resources that a rank holds, by unique numbers."""

    segments: set[str] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)


@dataclass
class RankReport:
    """The report that a rank sends at its end."""

    rank: int
    steps: list[StepRecord] = field(default_factory=list)
    transport: str = ""
    error_types: list[str] = field(default_factory=list)
    error: str = ""
    error_s: float = 0.0  # time.monotonic() when it was raised
    recovered_s: float | None = None  # after the first step with fewer replicas (torchft)
    footprint: Footprint = field(default_factory=Footprint)


@dataclass
class RankOutcome:
    """A rank as seen from outside."""

    rank: int
    report: RankReport | None = None  # None: it ended without one
    exit_code: int | None = None
    hung: str = ""  # how it hung; "" if it did not
    stderr: str = ""


@dataclass
class HangReport:
    """A hang report that the ranks wrote while they waited."""

    headline: str
    culprits: list[int]


@dataclass
class Outcome:
    """Everything that the judge uses."""

    trial: Trial
    ranks: list[RankOutcome]
    fault_s: float | None  # time.monotonic() just before the fault; None: it did not happen
    leaks: list[str] = field(default_factory=list)
    hang_reports: list[HangReport] = field(default_factory=list)
    took_s: float = 0.0
