"""The printed tables. Built from one run's document only, so a table never mixes numbers from two machines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.gpu.cases import MODELS_CASE
from torchddp.bench.gradients import goal_text, our_row
from torchddp.harness.machine import origin
from torchddp.harness.tables import number, plain_table, ratio_text, size_text


def model_table(result: dict[str, Any]) -> Table:
    """One model: each variant's step time, cost, kernels and ratio to torch's best."""
    title = f"{result['case']} · {size_text(result)}, {result['rounds']} rounds"
    table = plain_table(title, "variant", notes=lacking_notes(result["torch_lacks"]))
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


def lacking_notes(options: Collection[str]) -> list[str]:
    """Notes on tuning options that this torch lacks."""
    return [f"This torch has no {', '.join(options)}; a newer torch's best may be faster."] if options else []


def rows_table(result: dict[str, Any]) -> Table:
    """Single rows: names, numbers, and speed relative to the first."""
    rows = result["rows"]
    headings = list(dict.fromkeys(heading for row in rows for heading in row["values"]))
    notes = [result["note"]] if result["note"] else []
    table = plain_table(f"{result['case']} · {result['title']}", "way", *headings, notes=notes)
    compared = any(row.get("speed") for row in rows)
    if compared:
        table.add_column(Text("speed / the first's\np50 [p25..p75]"), justify="right", no_wrap=True)
    for row in rows:
        values = [row["values"].get(heading) for heading in headings]
        cells: list[str | Text] = [row["name"], *("" if value is None else _cell(value) for value in values)]
        if compared:
            cells.append(_speed_text(row["speed"]))
        table.add_row(*cells, style="bold" if row["name"].startswith("torchddp") else "")
    return table


def _cell(value: dict[str, float] | float) -> str:
    return number(value["median"] if isinstance(value, dict) else value)


def _speed_text(speed: dict[str, Any] | None) -> Text:
    """No colors, since ratios are green elsewhere if they are low, and here higher is better."""
    found = ratio_text(speed, "1 (the first)")
    found.style = "dim" if speed is None else ""
    return found


def least_text(goal: float, speed: dict[str, Any]) -> Text:
    """Whether a speed meets the goal, misses it, or is too noisy to tell (its median's 95% interval contains it)."""
    low, high = speed["ci95_low"], speed["ci95_high"]
    if low is not None and low >= goal:
        return Text(f"{goal:g} met", style="green")
    if high is not None and high < goal:
        return Text(f"{goal:g} missed", style="red")
    return Text(f"{goal:g} unclear", style="yellow")


def summary_table(results: Sequence[dict[str, Any]]) -> Table:
    """One line per goal, met or missed. Only for GPU numbers."""
    table = plain_table("Goals", "what")
    table.add_column("transport", no_wrap=True)
    table.add_column(Text("p50 [p25..p75]"), justify="right", no_wrap=True)
    table.add_column("goal", no_wrap=True)
    lacking: dict[str, None] = {}
    for result in results:
        if result["case"] == MODELS_CASE.name:
            ours = our_row(result)
            lacking |= dict.fromkeys(result["torch_lacks"])
            mark = "*" if result["torch_lacks"] else ""
            what = f"cost / torch's best{mark}, {result['model']}"
            table.add_row(what, ours["transport"] or "?", ratio_text(ours["ratio_to_best_torch"]), goal_text(result))
        for row in result.get("rows", ()):
            if row.get("goal") is not None:
                what = f"{row['name'].removeprefix('torchddp ')} / copy, {result['title'].partition(' in ')[0]}"
                table.add_row(what, "", _speed_text(row["speed"]), least_text(row["goal"], row["speed"]))
    for note in lacking_notes(lacking):
        table.caption = Text(f"* {note}", style="dim")
    return table


def _device_line(document: dict[str, Any]) -> Text:
    gpu = document["machine"].get("gpu")
    if gpu is None:
        return Text("On the CPU: this shows that the program runs, but says nothing about a GPU.", style="yellow")
    return Text(
        f"{gpu['name']} (compute capability {gpu['compute_capability']}), driver {gpu['driver']} · "
        f"CUDA {gpu['cuda']} · NCCL {gpu['nccl']}",
        style="dim",
    )


def footnotes(document: dict[str, Any]) -> Iterable[Text]:
    """Notes on how to read the numbers."""
    settings = document["settings"]
    yield _device_line(document)
    yield from origin(document)
    yield Text(
        "Medians, each step from an idle device. step: CUDA events; host: until backward() returned; cost: the step "
        "minus a nearby step without DDP; ratios are per round. tuned: torch's fastest options (those that this torch "
        "has) and the given bucket_cap_mb. Kernels are counted by torch's profiler.",
        style="dim",
    )
    if settings["world_size"] == 1 and settings["backend"] == "nccl":
        yield Text(
            "With one rank, NCCL moves nothing: the cost is that of packing and launching. Large gradients, which are "
            "reduced in place, cost almost nothing here.",
            style="dim",
        )
    if settings["world_size"] > 1:
        yield Text("Ranks share the available devices: this shows correctness and counts, not scaling.", style="yellow")
    if settings["quick"]:
        yield Text("--quick: small models, few rounds. Do not quote these numbers.", style="yellow")
    for failure in document["failures"]:
        yield Text(f"{failure['stage']} failed: {failure['error']}", style="red")


def render_result(result: dict[str, Any]) -> Table:
    """The table of one result."""
    return rows_table(result) if "rows" in result else model_table(result)


def render_end(document: dict[str, Any]) -> RenderableType:
    """Everything below the tables; the goals come last."""
    parts: list[RenderableType] = list(footnotes(document))
    if document["machine"].get("gpu") is not None and document["results"]:
        parts += ["", summary_table(document["results"])]
    return Group(*parts)
