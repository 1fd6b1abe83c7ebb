"""What is seen of a trial: by its ranks, and by who started them. Data only."""

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
    """What a rank holds of the machine, by numbers that nothing else has."""

    segments: set[str] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)


@dataclass
class RankReport:
    """What a rank says at its end."""

    rank: int
    steps: list[StepRecord] = field(default_factory=list)
    transport: str = ""
    error_types: list[str] = field(default_factory=list)
    error: str = ""
    error_s: float = 0.0  # time.monotonic() when it was raised
    recovered_s: float | None = None  # after the first step of fewer replicas (torchft)
    footprint: Footprint = field(default_factory=Footprint)


@dataclass
class RankOutcome:
    """A rank as seen from outside."""

    rank: int
    report: RankReport | None = None  # None: it said nothing before it ended
    exit_code: int | None = None
    hung: str = ""  # what it was waiting for when the time was over
    stderr: str = ""


@dataclass
class HangReport:
    """What the ranks found while they waited."""

    headline: str
    culprits: list[int]


@dataclass
class Outcome:
    """All that the judge looks at."""

    trial: Trial
    ranks: list[RankOutcome]
    fault_s: float | None  # time.monotonic() just before the fault; None: it never came to it
    leaks: list[str] = field(default_factory=list)
    hang_reports: list[HangReport] = field(default_factory=list)
    took_s: float = 0.0
