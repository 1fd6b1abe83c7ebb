"""The case `scaling`: training steps with an increasing number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from torchddp.bench.cases import ONE_CAP_MB, BenchCase, Settings
from torchddp.bench.options import Option, several, whole_number
from torchddp.bench.results import compared_rows, model_fields, row_style
from torchddp.bench.step_time import time_training
from torchddp.harness.command import MAX_WORLD_SIZE, Display
from torchddp.harness.machine import available_cores
from torchddp.harness.plots import COLORS, finish_panel, panels
from torchddp.harness.tables import number, plain_table, ranks_text, ratio_text, weight_text
from torchddp.harness.variants import ArgumentError, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OVERSUBSCRIBED = "* more ranks than cores: ranks share cores, which dominates the step time"


def parse_sizes(text: str) -> tuple[int, ...]:
    sizes = sorted(several(whole_number(1, MAX_WORLD_SIZE))(text))
    if sizes[0] != 1 or len(sizes) < 2:
        raise ArgumentError(f"must include 1, to which efficiency is relative, and more, not '{text}'")
    return tuple(sizes)


MARKERS = "osD^v<>P"
# Lines need more contrast than bars.
LOCAL_COLOR = "#495057"


def _run(case: BenchCase, settings: Settings, display: Display) -> list[dict[str, Any]]:
    """One launch per world size; the launches share the time for a model."""
    job = settings.job_of(case)
    world_sizes = job.options["world_sizes"]
    raws: dict[str, dict[int, dict[str, Any]]] = {model: {} for model in job.models}
    for world_size in world_sizes:
        display.start(f"{case.name}, world size {world_size}")
        share = replace(job, world_size=world_size, seconds=job.seconds / len(world_sizes))
        for raw in case.launch(share, display):
            raws[raw["model"]][world_size] = raw
    return [scaling_result(job.variants, raws[model], available_cores()) for model in job.models]


def scaling_result(variants: Sequence[Variant], raws: Mapping[int, dict[str, Any]], cores: int) -> dict[str, Any]:
    """The result of one model from its measurements by world size, including 1, to which efficiency is relative."""
    alone_ms: list[float] = []
    sizes = []
    for world_size, raw in sorted(raws.items()):
        best, rows = compared_rows(variants, raw["step_ms"])
        alone_ms = alone_ms or [row["step_ms"]["median"] for row in rows]
        for row, alone in zip(rows, alone_ms, strict=True):
            row["efficiency"] = alone / row["step_ms"]["median"]
        sizes.append(
            {
                "world_size": world_size,
                "oversubscribed": world_size > cores,
                "rounds": int(raw["step_ms"].shape[1]),
                "best_torch": best,
                "variants": rows,
            }
        )
    return {"case": "scaling", **model_fields(next(iter(raws.values()))), "unit": "ms", "sizes": sizes}


def _ranks(size: dict[str, Any]) -> str:
    return f"{size['world_size']}{'*' if size['oversubscribed'] else ''}"


def scaling_table(result: dict[str, Any]) -> Table:
    rounds = ", ".join(f"{size['rounds']} with {ranks_text(size['world_size'])}" for size in result["sizes"])
    notes = [f"rounds: {rounds}"]
    if any(size["oversubscribed"] for size in result["sizes"]):
        notes.append(OVERSUBSCRIBED)
    columns = ("step p50\nms", "step\np90", "effi-\nciency", "to torch's best\np50 [p25..p75]")
    table = plain_table(f"scaling · {weight_text(result)}", "ranks", *columns, second="variant", notes=notes)
    for size in result["sizes"]:
        ranks = _ranks(size)
        for row in size["variants"]:
            cells = [ranks, row["name"], number(row["step_ms"]["median"]), number(row["step_ms"]["p90"])]
            cells.append(f"{row['efficiency']:.0%}")
            table.add_row(*cells, ratio_text(row["ratio_to_best_torch"]), style=row_style(row))
            ranks = ""
        table.add_section()
    return table


def draw_scaling(results: Sequence[dict[str, Any]]) -> Figure:
    """Two panels per model: step time and efficiency."""
    figure, axes = panels(len(results), 2, 9.0, 3.2 * len(results))
    for row, result in zip(axes, results, strict=True):
        ranks = [size["world_size"] for size in result["sizes"]]
        by_size = [size["variants"] for size in result["sizes"]]
        for index, found in enumerate(zip(*by_size, strict=True)):  # a variant's rows
            name, role = found[0]["name"], found[0]["role"]
            style = {"color": COLORS[role], "marker": MARKERS[index % len(MARKERS)], "markersize": 4, "label": name}
            if role == "local":
                style |= {"color": LOCAL_COLOR, "linestyle": "--"}
            row[0].plot(ranks, [each["step_ms"]["median"] for each in found], **style)
            row[1].plot(ranks, [each["efficiency"] for each in found], **style)
        many = any(size["oversubscribed"] for size in result["sizes"])
        for axis, label in zip(row, ("step p50, ms", "efficiency, t(1) / t(n)"), strict=True):
            axis.set_xticks(ranks, [_ranks(size) for size in result["sizes"]])
            axis.set_ylim(bottom=0)
            finish_panel(axis, result["title"], "ranks (*: more than cores)" if many else "ranks", label)
        row[0].legend(fontsize=8, frameon=False)
    return figure


CASE = BenchCase(
    name="scaling",
    title="time of a training step by number of ranks (with a fixed batch per rank)",
    models=("mlp",),
    quick_models=("mlp",),
    seconds=30.0,
    caps_mb=ONE_CAP_MB,
    options={"world_sizes": Option((1, 2, 4), parse_sizes, "Numbers of ranks.", quick=(1, 2))},
    measure=time_training,
    run=_run,
    table=scaling_table,
    draw=draw_scaling,
    note=(
        "scaling: training steps as in step_time, with one launch per number of ranks. Efficiency is the class's step "
        "time on one rank divided by that on n ranks (weak scaling: the batch per rank is fixed). It compares "
        "launches, so it includes the machine's drift; ratios are within a launch."
    ),
)
