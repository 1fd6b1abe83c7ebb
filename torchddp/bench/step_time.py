"""The case `step_time`: the time of a whole training step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from torchddp.bench.cases import BenchCase, one_launch
from torchddp.bench.results import compared_rows, draw_bars, model_result, variants_table
from torchddp.bench.timing import Runner, start_together, time_model
from torchddp.harness.models import run_forward
from torchddp.harness.tables import number, ratio_text
from torchddp.harness.variants import Variant


@dataclass
class TrainingRunner(Runner):
    """A variant with its optimizer.

    The learning rate is zero: SGD does the same memory accesses, but weights don't change. So the variants can share
    weights, and the bare model, whose gradients are not averaged, stays equal on all ranks.
    """

    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD((p for p in self.module.parameters() if p.requires_grad), lr=0.0)

    def step(self, batch: object, world_size: int = 1) -> float:
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(run_forward(self.module, batch)).backward()
        self.optimizer.step()
        return (time.perf_counter_ns() - start_ns) / 1e6


def step_time_result(
    case: BenchCase, variants: Sequence[Variant], raw: dict[str, Any], world_size: int
) -> dict[str, Any]:
    best, rows = compared_rows(variants, raw["step_ms"])
    rounds = int(raw["step_ms"].shape[1])
    return model_result(case.name, raw, world_size, rows, unit=case.unit, rounds=rounds, best_torch=best)


def step_time_table(result: dict[str, Any]) -> Table:
    def cells(row: dict[str, Any]) -> list[str | Text]:
        times = (number(row["step_ms"][key]) for key in ("median", "p90", "p99"))
        return [*times, ratio_text(row["ratio_to_best_torch"])]

    columns = ("step p50\nms", "step\np90", "step\np99", "to torch's best\np50 [95% CI]")
    return variants_table(result, columns, cells)


CASE = BenchCase(
    name="step_time",
    title="time of a training step (forward, backward, SGD)",
    models=("mlp", "gpt"),
    quick_models=("mlp",),
    seconds=15.0,
    measure=partial(time_model, kind=TrainingRunner),
    run=partial(one_launch, step_time_result),
    table=step_time_table,
    draw=partial(draw_bars, key="step_ms", label="step, ms (p25..p75)", with_local=True),
    note=(
        "step_time: zero_grad, forward, backward and SGD (learning rate 0: same work, equal weights), in ms, "
        "of the slowest rank. Ratios are of whole steps, per round; no DDP is about what a class without cost takes."
    ),
)
