"""What each rank does for `torchddp trace`: some steps to warm up, then steps that are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchddp import _C
from torchddp.bench.subject import Subject, make_subject
from torchddp.bench.variants import ArgumentError
from torchddp.planner.plan import plan_of
from torchddp.planner.plan_cache import fingerprint, load_plan
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
    plan: str | None  # a file's path
    transport: str
    seed: int = 0


@dataclass(frozen=True)
class Traced:
    """What the ranks found."""

    profile: MergedProfile
    transport: str  # that moved the buckets
    device: str


def _kept_plan(path: Path, subject: Subject) -> _C.BucketPlan:
    """The plan of a file that `torchddp tune` kept; ArgumentError if it is not for this model and group."""
    specs, transport = subject.model._specs, subject.model.reducer.transport
    try:
        buckets = load_plan(path, fingerprint(specs, subject.device.type), transport.size, transport.name)
        if buckets is None:
            raise ArgumentError(f"--plan: there is no file '{path}'.")
        return plan_of(buckets, specs)
    except ArgumentError:
        raise
    except ValueError as error:
        raise ArgumentError(f"--plan: {error}") from error


def trace_rank(report: Callable[[float, float], None], settings: TraceSettings) -> Traced:
    """One rank's part; collective. Every rank returns the same."""
    subject = make_subject(
        settings.model, settings.seed, bucket_cap_mb=settings.bucket_cap_mb, transport=settings.transport
    )
    ddp = subject.model
    if settings.plan is not None:
        ddp.reducer._adopt_plan(_kept_plan(Path(settings.plan), subject))
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
