"""What each rank does for `torchddp trace`: some steps to warm up, then steps that are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchddp.bench.subject import make_subject
from torchddp.profiler.merge import MergedProfile
from torchddp.profiler.session import profile

# Buckets are rebuilt at the second step; memory and caches are warm some steps later.
WARMUP_STEPS = 5


@dataclass(frozen=True)
class TraceSettings:
    """What the command line asked for, checked."""

    model: str
    world_size: int
    steps: int
    bucket_cap_mb: float | None
    transport: str
    seed: int = 0


@dataclass(frozen=True)
class Traced:
    """What the ranks found."""

    profile: MergedProfile
    transport: str  # that moved the buckets
    device: str


def trace_rank(report: Callable[[float, float], None], settings: TraceSettings) -> Traced:
    """One rank's part; collective. Every rank returns the same."""
    subject = make_subject(
        settings.model, settings.seed, bucket_cap_mb=settings.bucket_cap_mb, transport=settings.transport
    )
    ddp = subject.model
    total = WARMUP_STEPS + settings.steps

    def step(index: int) -> None:
        subject.step(index)
        report(index + 1, total)

    for index in range(WARMUP_STEPS):
        step(index)
    with profile(ddp, steps=settings.steps) as recorded:
        for index in range(WARMUP_STEPS, total):
            step(index)
    return Traced(recorded.gather(), ddp.reducer.transport_name, ddp.device_type)
