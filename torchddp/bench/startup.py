"""The case `startup`: rebuilds every variant each round and times its constructor and first two steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from torchddp.bench import timing
from torchddp.bench.cases import ONE_CAP_MB, BenchCase, Job, one_launch
from torchddp.bench.results import compared_rows, draw_bars, model_result, variants_table
from torchddp.harness.launch import Report
from torchddp.harness.models import describe_model, make_model
from torchddp.harness.stats import summarize
from torchddp.harness.tables import number, ratio_text
from torchddp.harness.variants import Variant

CLOCKS = ("constructor_ms", "first_step_ms", "second_step_ms")


@dataclass
class Beginning:
    """A variant that is rebuilt for every measurement."""

    variant: Variant
    original: nn.Module
    loss: Callable[[Any], Tensor]

    def step(self, batch: object, world_size: int = 1) -> list[float]:
        """Build the variant, run two steps, drop it; times in ms of the constructor (0: bare model) and each step."""
        constructor_ms = 0.0

        def build(cls: type, module: nn.Module, options: dict[str, Any]) -> nn.Module:
            nonlocal constructor_ms
            timing.start_together(world_size)
            start_ns = time.perf_counter_ns()
            wrapped: nn.Module = cls(module, **options)
            constructor_ms = (time.perf_counter_ns() - start_ns) / 1e6
            return wrapped

        (module,) = timing.wrap_copies(self.original, (self.variant,), build)
        runner = timing.Runner(self.variant, module, self.loss)
        times_ms = [constructor_ms, runner.step(batch, world_size), runner.step(batch, world_size)]
        del runner, module
        # Collected untimed, so that freeing the reducer's memory and threads is not charged to the next variant.
        gc.collect()
        return times_ms


def time_startup(job: Job, model_name: str, report: Report) -> dict[str, Any]:
    """Check gradients, then measure times in ms, [clock, variant, round]. Returns the same dict on every rank."""
    batch, other_batch = timing.two_batches(job, model_name)
    # Pays the costs that only the first wrapper of a process has, such as imports.
    runners = timing.build_runners(job, model_name)
    timing.check_gradients(job, model_name, runners, other_batch)
    model = describe_model(model_name, runners[0].module, job.seed)
    del runners

    original, loss = make_model(model_name, job.seed), timing.loss_of(job, model_name)
    clocks = timing.timed_rounds([Beginning(variant, original, loss) for variant in job.variants], batch, job, report)
    return {**model, "times_ms": timing.over_ranks(clocks, job)}


def startup_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The result of one model; `total_ms` is the per-round sum of the three times, to which the ratio refers."""
    times_ms = raw["times_ms"]  # [clock, variant, round]
    best, rows = compared_rows(variants, times_ms.sum(axis=0), "total_ms")
    for index, row in enumerate(rows):
        row |= {name: summarize(clock[index]) for name, clock in zip(CLOCKS, times_ms, strict=True)}
    rounds = int(times_ms.shape[2])
    return model_result("startup", raw, world_size, rows, unit="ms", rounds=rounds, best_torch=best)


def startup_table(result: dict[str, Any]) -> Table:
    """Each variant's constructor, first two steps, and their sum."""

    def cells(row: dict[str, Any]) -> list[str | Text]:
        constructor, *steps = (number(row[clock]["median"]) for clock in CLOCKS)
        total = (number(row["total_ms"][key]) for key in ("median", "p90"))
        built = "" if row["role"] == "local" else constructor
        return [built, *steps, *total, ratio_text(row["ratio_to_best_torch"])]

    columns = ("con-\nstructor", "step 1", "step 2", "total\np50", "total\np90", "to torch's best\np50 [p25..p75]")
    return variants_table(result, columns, cells)


CASE = BenchCase(
    name="startup",
    title="time until training runs (constructor and first two steps)",
    models=("small", "mlp"),
    quick_models=("mlp",),
    seconds=15.0,
    caps_mb=ONE_CAP_MB,
    measure=time_startup,
    run=partial(one_launch, startup_result),
    table=startup_table,
    draw=partial(draw_bars, key="total_ms", label="constructor and two steps, ms (p25..p75)"),
    note=(
        "startup: p50 in ms of the slowest rank. Each round rebuilds every variant in a process that has built it "
        "before, so imports and the setup of the process group are not included. A step is forward and backward. "
        "total: the sum within a round, to which the ratio refers."
    ),
)
