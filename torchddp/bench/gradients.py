"""The cases `exposed` and `per_param`: what a class adds to forward and backward, compared with our goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp.bench.cases import BenchCase, Settings, one_launch
from torchddp.bench.results import added_ms, compared_rows, draw_bars, model_result, variants_table
from torchddp.bench.timing import time_model
from torchddp.harness.command import Display
from torchddp.harness.stats import summarize
from torchddp.harness.tables import number, plain_table, ratio_text
from torchddp.harness.variants import Variant

PER_PARAM_UNIT = "us/param"
# The goal is "unclear" if noise exceeded torch's cost in more than this share of the rounds.
MAX_ODD_SHARE = 0.1


def _run(case: BenchCase, settings: Settings, display: Display) -> list[dict[str, Any]]:
    return one_launch(partial(timed_result, case), case, settings, display)


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
    return model_result(
        case.name,
        raw,
        world_size,
        rows,
        unit=case.unit,
        rounds=int(step_ms.shape[1]),
        best_torch=best,
        # Goals are set for the case's own models only.
        goal_ratio=case.goal_ratio if raw["model"] in case.models else None,
    )


def timed_table(result: dict[str, Any]) -> Table:
    """One model: each variant's step, cost and ratio to torch's best."""

    def cells(row: dict[str, Any]) -> list[str | Text]:
        times = [row["step_ms"], *([row["cost"]] if "cost" in row else [])]
        ratio = [ratio_text(row["ratio_to_best_torch"])] if "cost" in row else []
        return [*(number(time[key]) for time in times for key in ("median", "p90")), *ratio]

    columns = (
        "step p50\nms",
        "step\np90",
        f"cost p50\n{result['unit']}",
        "cost\np90",
        "to torch's best\np50 [p25..p75]",
    )
    return variants_table(result, columns, cells)


def our_row(result: dict[str, Any]) -> dict[str, Any]:
    """The first row of the class under test: the one without tuned options."""
    found: dict[str, Any] = next(row for row in result["variants"] if row["role"] == "ours")
    return found


def goal_text(result: dict[str, Any]) -> Text:
    """Whether the goal is met, missed, or unclear (it lies in the median's 95% interval); empty without a goal."""
    goal, ratio = result["goal_ratio"], our_row(result)["ratio_to_best_torch"]
    if goal is None:
        return Text("")
    if ratio["odd_rounds"] > MAX_ODD_SHARE * ratio["rounds"]:
        return Text(f"{goal:g} unclear", style="yellow")
    low, high = ratio["ci95_low"], ratio["ci95_high"]
    if high is not None and high <= goal:
        return Text(f"{goal:g} met", style="green")
    if low is None or low > goal:
        return Text(f"{goal:g} missed", style="red")
    return Text(f"{goal:g} unclear", style="yellow")


def summary_tables(results: Sequence[dict[str, Any]]) -> list[Table]:
    columns = ("torch\ndefault", "torch best\n@ cap MiB", "ours", "ours / torch best\np50 [p25..p75]")
    title = "Summary: our cost compared with torch's best (per_param in us, otherwise ms)"
    table = plain_table(title, "case", *columns, second="model")
    table.add_column("goal", no_wrap=True)
    for result in results:
        rows, ours = {row["name"]: row for row in result["variants"]}, our_row(result)
        best = rows[result["best_torch"]]
        cap_mb = best["options"].get("bucket_cap_mb")
        cap = " default" if cap_mb is None else f" @{cap_mb:g}"
        table.add_row(
            result["case"],
            result["model"],
            number(rows["torch default"]["cost"]["median"]),
            number(best["cost"]["median"]) + cap,
            number(ours["cost"]["median"]),
            ratio_text(ours["ratio_to_best_torch"]),
            goal_text(result),
        )
    return [table]


PER_PARAM = BenchCase(
    name="per_param",
    title="cost per parameter (DDP step minus the same step without DDP, divided by the number of parameters)",
    models=("small",),
    quick_models=("small",),
    default_world_size=1,
    unit=PER_PARAM_UNIT,
    goal_ratio=0.15,
    measure=time_model,
    run=_run,
    table=timed_table,
    summary=summary_tables,
    draw=draw_bars,
    note=(
        "cost: the step minus a nearby step without DDP. Costs and ratios are taken per round; the table shows their "
        "medians."
    ),
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
    goal_ratio=0.95,
)
