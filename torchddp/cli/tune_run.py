"""`torchddp tune` without its command line: makes the candidates, times them on all ranks, and chooses the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.bench.cases import Job
from torchddp.bench.timing import over_ranks, timed_rounds
from torchddp.harness.launch import ModelSettings
from torchddp.harness.models import Subject, make_subject
from torchddp.harness.stats import PairedRatio, paired_ratio, summarize
from torchddp.plan.buckets import Buckets, buckets_of, finish_s, planned_buckets
from torchddp.plan.record_profile import record_profile
from torchddp.plan.step_profile import StepProfile
from torchddp.transport.message_cost import seconds_of

DEFAULT_CAPS_MB: tuple[float, ...] = (0.25, 0.5, 1, 2, 5, 10, 25, 50, 100)
# A candidate's consecutive steps in a round. The first one touches new memory, so it is not timed.
SETTLING_STEPS, TIMED_STEPS = 1, 2
# A smaller gain, as a share of the step, is not worth changing an argument.
LEAST_GAIN = 0.02
# A candidate that may be this much faster than the default, or slower, says that the steps are too noisy.
NOISE = 0.1


@dataclass(frozen=True)
class Candidate:
    name: str
    argument: str  # of DistributedDataParallel; empty for its default
    buckets: Buckets
    cap_mb: float | None = None  # the argument, if it is a size


def make_candidates(profile: StepProfile, caps_mb: Sequence[float]) -> tuple[Candidate, ...]:
    """The profile's own buckets (the default), the planned ones, and those of each cap, in the profile's order.

    Of caps that make the same buckets, only the smallest is used, up to the first that holds all gradients.
    """
    specs = [
        _C.ParamSpec(g.name, g.numel, g.itemsize, dtype=g.dtype, device=g.device, sparse=g.sparse)
        for g in profile.gradients
    ]
    planned = planned_buckets(profile.gradients, profile.order, profile.ready_s, profile.cost)
    found = [Candidate("default", "", profile.buckets), Candidate("planned", 'bucket_cap_mb="auto"', planned)]
    for cap_mb in sorted(set(caps_mb)):
        buckets = buckets_of(_C.make_bucket_plan(specs, profile.order, [max(1, int(cap_mb * 2**20))]))
        if all(other.buckets != buckets for other in found if other.cap_mb is not None):
            found.append(Candidate(f"{cap_mb:g} MiB", f"bucket_cap_mb={cap_mb:g}", buckets, cap_mb))
        if len(buckets) == len({(g.dtype, g.device, g.sparse) for g in profile.gradients}):
            break  # one of each kind: a larger cap changes nothing
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class TuneSettings(ModelSettings):
    caps_mb: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class TuneResult:
    """Rank 0's result. ``step_ms``: [candidate, round], of the slowest rank; ``seconds``: the time that rounds took."""

    profile: StepProfile
    candidates: tuple[Candidate, ...]
    step_ms: np.ndarray
    threads: int = 1
    seconds: float = 0.0


def tune_on_rank(report: Callable[[float, float], None], settings: TuneSettings) -> TuneResult:
    """Record a profile, and time the candidates. Collective."""
    subject = make_subject(settings)
    start_s = time.monotonic()

    def step() -> None:
        subject.step(0)
        elapsed_s = time.monotonic() - start_s
        report(elapsed_s, max(settings.seconds, elapsed_s))  # a round of a large model may take minutes

    profile = record_profile(subject.model, step, name=settings.model)
    candidates = make_candidates(profile, settings.caps_mb)
    specs = subject.model.session.specs
    runners = [_Runner(subject, step, _C.BucketPlan(candidate.buckets, specs)) for candidate in candidates]
    job = Job(
        "tune",
        models=(settings.model,),
        variants=(),
        world_size=settings.world_size,
        seconds=settings.seconds,
        backend=dist.get_backend(),
    )
    begin_s = time.monotonic()
    step_ms = over_ranks(timed_rounds(runners, None, job, report))
    seconds = max(settings.seconds, time.monotonic() - begin_s)
    return TuneResult(profile, candidates, step_ms, torch.get_num_threads(), seconds)


@dataclass(frozen=True)
class _Runner:
    subject: Subject
    settle: Callable[[], None]
    plan: _C.BucketPlan

    def step(self, batch: object, world_size: int = 1) -> float:
        subject = self.subject
        subject.model.reducer.adopt_plan(self.plan)
        for _ in range(SETTLING_STEPS):
            self.settle()
        return float(np.median([1e3 * seconds_of(lambda: subject.step(0), subject.device) for _ in range(TIMED_STEPS)]))


# --- from step times to the answer (pure) ---


def predicted_ms(profile: StepProfile, candidate: Candidate) -> float:
    """The step time that the planner expects: forward, then backward until the last bucket is reduced."""
    end_s = finish_s(candidate.buckets, profile.gradients, profile.ready_s, profile.cost)
    return 1e3 * (profile.forward_s + profile.overhead_s + max(end_s, profile.backward_s))


@dataclass(frozen=True)
class Choice:
    """The candidate to use, and whether another one may still be faster."""

    index: int
    ratios: tuple[PairedRatio, ...]  # of each candidate to the default, by round
    doubtful: int | None  # the most promising candidate, if more rounds could show that it is faster than the default


def choose(step_ms: np.ndarray, same: Collection[int] = ()) -> Choice:
    """Choose the fastest candidate that is significantly faster than the default, or else the default (0).

    Significantly: the 95% interval of the paired ratio lies below 1, and its median promises `LEAST_GAIN`, because the
    luckiest of many equal candidates is often a little faster. Of the candidates that can't be told apart from
    the fastest, the first is chosen, which is the planned one if it is among them. Doubtful: none is significantly
    faster, but a ratio's median promises a gain, or is at most 1 with an interval that leaves room for twice the gain,
    or its interval is so wide that it says nothing.
    ``step_ms``: [candidate, round]. ``same``: those with the default's own buckets, faster only by chance.
    """
    ratios = tuple(paired_ratio(row, step_ms[0]) for row in step_ms)
    others = [index for index in range(1, len(ratios)) if index not in same]
    if not others:
        return Choice(0, ratios, None)
    faster = [index for index in others if ratios[index].ci95_high < 1 and ratios[index].median < 1 - LEAST_GAIN]
    if faster:
        fastest = min(faster, key=lambda index: float(np.median(step_ms[index])))
        for index in faster:
            if index == fastest or paired_ratio(step_ms[index], step_ms[fastest]).ci95_low <= 1:
                return Choice(index, ratios, None)
    promising = min(others, key=lambda index: (ratios[index].median, ratios[index].ci95_low))
    ratio = ratios[promising]
    in_doubt = ratio.median < 1 - LEAST_GAIN or (ratio.median <= 1 and ratio.ci95_low < 1 - 2 * LEAST_GAIN)
    if in_doubt:
        return Choice(0, ratios, promising)
    wide = [index for index in others if ratios[index].ci95_low < 1 - NOISE and ratios[index].ci95_high >= 1]
    return Choice(0, ratios, min(wide, key=lambda index: ratios[index].ci95_low, default=None))


def tune_document(result: TuneResult) -> dict[str, Any]:
    profile, candidates, step_ms = result.profile, result.candidates, result.step_ms
    same = [index for index, each in enumerate(candidates) if index and each.buckets == candidates[0].buckets]
    choice = choose(step_ms, same)
    rows = [
        {
            "name": candidate.name,
            "argument": candidate.argument,
            "cap_mb": candidate.cap_mb,
            "buckets": len(candidate.buckets),
            "predicted_ms": predicted_ms(profile, candidate),
            "step_ms": summarize(step_ms[index]),
            "same_buckets": index in same,
            "ratio_to_default": None if index == 0 or index in same else choice.ratios[index].to_dict(),
            "chosen": index == choice.index and choice.doubtful is None,
        }
        for index, candidate in enumerate(candidates)
    ]
    return {
        "case": "tune",
        "model": profile.model,
        "world_size": profile.world_size,
        "transport": profile.transport,
        "gradient_bytes": profile.gradient_bytes,
        "parameters": len(profile.gradients),
        "rounds": int(step_ms.shape[1]),
        "seconds": result.seconds,
        "least_gain": LEAST_GAIN,
        "in_doubt": None if choice.doubtful is None else candidates[choice.doubtful].name,
        "threads": result.threads,
        "compute_ms": 1e3 * profile.compute_s,
        "cost": {
            "alpha_us": 1e6 * profile.cost.alpha_s,
            "beta_ns_per_byte": 1e9 * profile.cost.beta_s_per_byte,
            "misfit": profile.cost.misfit,
        },
        "argument": candidates[choice.index].argument if choice.doubtful is None else None,
        "candidates": rows,
        "profile": profile.to_dict(),
    }
