"""The cases `exposed` and `per_param`: what a class adds to forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp.bench.cases import BenchCase, one_launch
from torchddp.bench.results import added_ms, compared_rows, draw_bars, model_result, variants_table
from torchddp.bench.timing import time_model
from torchddp.harness.stats import summarize
from torchddp.harness.tables import number, ratio_text
from torchddp.harness.variants import Variant

PER_PARAM_UNIT = "us/param"


def timed_result(case: BenchCase, variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    step_ms = raw["step_ms"]
    cost = added_ms(variants, step_ms)  # in the case's unit
    if case.unit == PER_PARAM_UNIT:
        cost *= 1000.0 / raw["parameters"]
    best, rows = compared_rows(variants, cost, "cost")
    for row, times_ms in zip(rows, step_ms, strict=True):
        row["step_ms"] = summarize(times_ms)
        if row["role"] == "local":
            del row["cost"], row["ratio_to_best_torch"]
    return model_result(case.name, raw, world_size, rows, unit=case.unit, rounds=int(step_ms.shape[1]), best_torch=best)


def timed_table(result: dict[str, Any]) -> Table:
    def cells(row: dict[str, Any]) -> list[str | Text]:
        times = [row["step_ms"], *([row["cost"]] if "cost" in row else [])]
        ratio = [ratio_text(row["ratio_to_best_torch"])] if "cost" in row else []
        return [*(number(time[key]) for time in times for key in ("median", "p90")), *ratio]

    columns = (
        "step p50\nms",
        "step\np90",
        f"cost p50\n{result['unit']}",
        "cost\np90",
        "to torch's best\np50 [95% CI]",
    )
    return variants_table(result, columns, cells)


PER_PARAM = BenchCase(
    name="per_param",
    title="cost per parameter (DDP step minus the same step without DDP, divided by the number of parameters)",
    models=("small",),
    default_world_size=1,
    unit=PER_PARAM_UNIT,
    key="cost",
    measure=time_model,
    run=partial(one_launch, timed_result),
    table=timed_table,
    draw=draw_bars,
    note="cost: the step minus a nearby step without DDP. Costs and ratios are per round; the table shows medians.",
)
EXPOSED = replace(
    PER_PARAM,
    name="exposed",
    title="exposed cost (DDP step minus the same step without DDP, forward and backward)",
    models=("small", "mlp", "gpt", "conv"),
    quick_models=("small", "mlp", "conv"),
    default_world_size=2,
    seconds=15.0,
    unit="ms",
)
