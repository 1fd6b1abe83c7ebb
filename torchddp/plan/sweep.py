"""Worker side: record a profile, then time every candidate, interleaved, on the same model."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.harness.subject import Subject, make_subject
from torchddp.plan.candidates import Candidate, make_candidates
from torchddp.plan.record_profile import record_profile, timed_step
from torchddp.plan.step_profile import StepProfile

# Steps of a candidate in a row: the first ones meet new memory.
SETTLING_STEPS, TIMED_STEPS = 1, 2
MIN_ROUNDS = 5


@dataclass(frozen=True)
class TuneSettings:
    """What the command line asked for, checked."""

    model: str
    transport: str
    caps_mb: tuple[float, ...]
    seconds: float
    world_size: int
    seed: int = 0


@dataclass(frozen=True)
class TuneResult:
    """What rank 0 brings back. ``step_ms``: [candidate, round], of the slowest rank."""

    profile: StepProfile
    candidates: tuple[Candidate, ...]
    step_ms: np.ndarray
    threads: int = 1


def tune_on_rank(report: Callable[[float, float], None], settings: TuneSettings) -> TuneResult:
    """Collective: the whole of it, on every rank."""
    subject = make_subject(settings.model, settings.seed, transport=settings.transport)

    def step() -> None:
        subject.step(0)
        report(0.0, settings.seconds)  # alive

    profile = record_profile(subject.model, step, name=settings.model)
    candidates = make_candidates(profile, settings.caps_mb)
    step_ms = _time_all(subject, lambda: subject.step(0), candidates, settings, report)
    return TuneResult(profile, candidates, step_ms, torch.get_num_threads())


def _time_all(
    subject: Subject,
    step: Callable[[], Any],
    candidates: Sequence[Candidate],
    settings: TuneSettings,
    report: Callable[[float, float], None],
) -> np.ndarray:
    plans = [_C.BucketPlan(candidate.buckets, subject.model._specs) for candidate in candidates]
    shuffler = random.Random(settings.seed)  # the same order on all ranks, another one each round
    order = list(range(len(plans)))
    rounds: list[np.ndarray] = []
    start_s = time.monotonic()
    while True:
        shuffler.shuffle(order)
        times = np.zeros(len(plans))
        for index in order:
            subject.model.reducer.adopt_plan(plans[index])
            for _ in range(SETTLING_STEPS):
                step()
            times[index] = np.median([1e3 * timed_step(step, subject.device) for _ in range(TIMED_STEPS)])
            elapsed_s = time.monotonic() - start_s
            report(elapsed_s, max(settings.seconds, elapsed_s))
        rounds.append(times)
        mine = [len(rounds) >= MIN_ROUNDS and elapsed_s >= settings.seconds]
        dist.broadcast_object_list(mine, src=0)  # when to stop is rank 0's word
        if mine[0]:
            break
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, np.stack(rounds, axis=1))
    slowest: np.ndarray = np.max(np.stack(by_rank), axis=0)
    return slowest
