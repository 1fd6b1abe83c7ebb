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

from torchddp.bench.model_spec import run_forward
from torchddp.bench.models import find_model, make_batch, make_model
from torchddp.bench.variants import ArgumentError
from torchddp.distributed import DistributedDataParallel
from torchddp.planner.plan import plan_of
from torchddp.planner.record_profile import record_profile, timed_step
from torchddp.planner.step_profile import StepProfile
from torchddp.tune.candidates import Candidate, make_candidates

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


def tune_on_rank(report: Callable[[float, float], None], settings: TuneSettings) -> TuneResult:
    """Collective: the whole of it, on every rank."""
    if dist.get_world_size() == 1:
        raise ArgumentError("With one rank no gradient is sent, so there is nothing to tune; use --world-size 2.")
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    module = make_model(settings.model, settings.seed).to(device)
    batch = _moved(make_batch(settings.model, settings.seed, dist.get_rank(), 0), device)
    spec = find_model(settings.model)
    model = DistributedDataParallel(
        module, device_ids=[device.index] if device.type == "cuda" else None, transport=settings.transport
    )

    def step() -> None:
        model.zero_grad(set_to_none=True)
        spec.loss(run_forward(model, batch)).backward()

    profile = record_profile(model, step, name=settings.model)
    candidates = make_candidates(profile, settings.caps_mb)
    return TuneResult(profile, candidates, _time_all(model, step, candidates, device, settings, report))


def _time_all(
    model: DistributedDataParallel,
    step: Callable[[], Any],
    candidates: Sequence[Candidate],
    device: torch.device,
    settings: TuneSettings,
    report: Callable[[float, float], None],
) -> np.ndarray:
    plans = [plan_of(candidate.buckets, model._specs) for candidate in candidates]
    shuffler = random.Random(settings.seed)  # the same order on all ranks, another one each round
    order = list(range(len(plans)))
    rounds: list[np.ndarray] = []
    start_s = time.monotonic()
    while True:
        shuffler.shuffle(order)
        times = np.zeros(len(plans))
        for index in order:
            model.reducer._adopt_plan(plans[index])
            for _ in range(SETTLING_STEPS):
                step()
            times[index] = np.median([1e3 * timed_step(step, device) for _ in range(TIMED_STEPS)])
        rounds.append(times)
        elapsed_s = time.monotonic() - start_s
        report(elapsed_s, max(settings.seconds, elapsed_s))
        mine = [len(rounds) >= MIN_ROUNDS and elapsed_s >= settings.seconds]
        dist.broadcast_object_list(mine, src=0)  # when to stop is rank 0's word
        if mine[0]:
            break
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, np.stack(rounds, axis=1))
    slowest: np.ndarray = np.max(np.stack(by_rank), axis=0)
    return slowest


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: _moved(value, device) for key, value in batch.items()}
    return type(batch)(_moved(value, device) for value in batch) if isinstance(batch, (tuple, list)) else batch
