"""The tables a person reads. Built from one run's document only, so a table never holds numbers of two machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.gpu.cases import MODELS_CASE
from torchddp.bench.gradients import goal_text, our_row
from torchddp.harness.machine import origin
from torchddp.harness.tables import number, plain_table, ratio_text, size_text


def model_table(result: dict[str, Any]) -> Table:
    """One model: every variant with its step, its cost, its kernels and its ratio to torch's best."""
    table = plain_table(f"gpu · {size_text(result)}, {result['rounds']} rounds", "variant")
    for heading in ("step\nms", "host\nms", "cost\nms", "kernels\na step", "copies,\nfills"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(Text("to torch's best\np50 [p25..p75]"), justify="right", no_wrap=True)
    for row in result["variants"]:
        work = row["work_per_step"]
        cells: list[str | Text] = [row["name"], number(row["step_ms"]["median"]), number(row["host_ms"]["median"])]
        cells.append(number(row["cost"]["median"]) if "cost" in row else "")
        cells += [f"{work['kernels']:.0f}", f"{work['copies'] + work['fills']:.0f}"]
        cells.append(ratio_text(row["ratio_to_best_torch"]) if "cost" in row else "")
        table.add_row(*cells, style="bold" if row["role"] == "ours" else "")
    return table


def summary_table(models: Sequence[dict[str, Any]]) -> Table:
    """Each goal in one line, met or missed. For numbers of a GPU only."""
    table = plain_table("Goals", "what")
    table.add_column("transport", no_wrap=True)
    table.add_column(Text("p50 [p25..p75]"), justify="right", no_wrap=True)
    table.add_column("goal", no_wrap=True)
    for result in models:
        ours = our_row(result)
        what = f"cost / torch's best, {result['model']}"
        table.add_row(what, ours["transport"] or "?", ratio_text(ours["ratio_to_best_torch"]), goal_text(result))
    return table


def _device_line(document: dict[str, Any]) -> Text:
    gpu = document["machine"].get("gpu")
    if gpu is None:
        return Text("On the CPU: this shows that the program runs, and nothing about a GPU.", style="yellow")
    return Text(
        f"{gpu['name']} (compute capability {gpu['compute_capability']}), driver {gpu['driver']} · "
        f"CUDA {gpu['cuda']} · NCCL {gpu['nccl']}",
        style="dim",
    )


def footnotes(document: dict[str, Any]) -> Iterable[Text]:
    """What a reader needs to judge the numbers."""
    settings = document["settings"]
    yield _device_line(document)
    yield from origin(document)
    yield Text(
        "Medians, each step from an idle device. step: CUDA events; host: until backward() returned; cost: the step "
        "minus the local step near it; a ratio is per round. tuned: torch's fastest options (those that this torch "
        "has) and the bucket_cap_mb named. Kernels as torch's profiler counts them.",
        style="dim",
    )
    if settings["world_size"] > 1:
        yield Text(
            "Ranks share what devices there are: this shows correctness and counts, not scaling.", style="yellow"
        )
    if settings["quick"]:
        yield Text("--quick: small models, few rounds. Do not quote it.", style="yellow")


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report; the goals last."""
    models = [result for result in document["results"] if result["case"] == MODELS_CASE.name]
    parts: list[RenderableType] = []
    for table in map(model_table, models):
        parts += [table, ""]
    parts += footnotes(document)
    if document["machine"].get("gpu") is not None:
        parts += ["", summary_table(models)]
    return Group(*parts)
