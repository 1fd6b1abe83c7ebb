"""What each rank does for `torchddp trace`: some steps to warm up, then steps that are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from torchddp import _C
from torchddp.ddp.module import DistributedDataParallel
from torchddp.harness.subject import make_subject
from torchddp.harness.variants import ArgumentError
from torchddp.plan.model_plan import plan_key
from torchddp.plan.plan_cache import load_plan
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


def _use_kept_plan(path: Path, model: DistributedDataParallel) -> None:
    """Collective: the buckets that `torchddp tune` kept in a file, as rank 0 reads it.

    ArgumentError on all ranks if they are not for this model and group.
    """
    key = plan_key(model)
    plan: _C.BucketPlan | None = None
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            buckets = load_plan(path, key)
            if buckets is None:
                raise ValueError(f"there is no file '{path}'.")
            plan = _C.BucketPlan(buckets, model._specs)
        except ValueError as error:
            problem = [f"--plan: {error}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise ArgumentError(problem[0])
    model.reducer.adopt_plan(plan)


def trace_rank(report: Callable[[float, float], None], settings: TraceSettings) -> Traced:
    """One rank's part; collective. Every rank returns the same."""
    subject = make_subject(
        settings.model, settings.seed, bucket_cap_mb=settings.bucket_cap_mb, transport=settings.transport
    )
    ddp = subject.model
    if settings.plan is not None:
        _use_kept_plan(Path(settings.plan), ddp)
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
