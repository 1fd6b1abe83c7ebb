"""Worker side of the case: build every variant anew, again and again, and time how it begins."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from torchddp.bench.cases import Job
from torchddp.bench.timing import (
    Report,
    Runner,
    agreed,
    build_runners,
    check_gradients,
    enough,
    loss_of,
    over_ranks,
    start_together,
    wrap_copies,
)
from torchddp.harness.models import describe_model, make_batch, make_model
from torchddp.harness.variants import Variant

STEPS = 2


class Begin:
    """One beginning of a variant: constructor, then the first steps."""

    def __init__(self, job: Job, original: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> None:
        self._job, self._original, self._loss, self._batch = job, original, loss, batch
        self._constructor_ms = 0.0

    def _wrap(self, cls: type, module: nn.Module, options: dict[str, Any]) -> nn.Module:
        start_together(self._job.world_size)
        start_ns = time.perf_counter_ns()
        wrapped: nn.Module = cls(module, **options)
        self._constructor_ms = (time.perf_counter_ns() - start_ns) / 1e6
        return wrapped

    def __call__(self, variant: Variant) -> list[float]:
        """Times in ms: of the constructor, 0 for the bare model, and of each step. What was built is gone after it."""
        self._constructor_ms = 0.0
        (module,) = wrap_copies(self._original, (variant,), self._wrap)
        runner = Runner(variant, module, self._loss)
        times_ms = [self._constructor_ms, *(runner.step(self._batch, self._job.world_size) for _ in range(STEPS))]
        del runner, module
        # Outside the timed parts, and before a reducer's memory and threads could fall into the next variant's time.
        gc.collect()
        return times_ms


def time_startup(job: Job, model_name: str, report: Report) -> dict[str, Any]:
    """[clock, variant, round] of times in ms, after the gradients proved equal. The same dict on every rank."""
    rank = dist.get_rank()
    batch, other_batch = (make_batch(model_name, job.seed, rank, index) for index in (0, 1))
    # What only the first wrapper of a process pays, such as imports, is paid here.
    runners = build_runners(job, model_name)
    check_gradients(job, model_name, runners, other_batch)
    model = describe_model(model_name, runners[0].module, job.seed)
    del runners

    begin = Begin(job, make_model(model_name, job.seed), loss_of(job, model_name), batch)
    gc.collect()
    gc.freeze()
    try:
        rounds = _rounds(job, begin, report)
    finally:
        gc.unfreeze()
    clocks = np.array(rounds).T  # [clock, variant, round]
    return {**model, "times_ms": np.stack([over_ranks(clock, job) for clock in clocks])}


def _rounds(job: Job, begin: Begin, report: Report) -> list[list[list[float]]]:
    """[round][variant][clock] on this rank, in the same order on every rank, another one each round."""
    shuffler = random.Random(job.seed)
    order = list(range(len(job.variants)))
    rounds: list[list[list[float]]] = []
    start_s = time.monotonic()
    finished = False
    while not finished:
        shuffler.shuffle(order)
        times_ms: list[list[float]] = [[] for _ in order]
        for index in order:
            times_ms[index] = begin(job.variants[index])
        rounds.append(times_ms)
        elapsed_s = time.monotonic() - start_s
        report(elapsed_s, max(job.seconds, elapsed_s))
        finished = agreed(enough(len(rounds), elapsed_s, job.seconds), job)
    return rounds
