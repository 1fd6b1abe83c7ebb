"""The printed tables. Built from the document only, so that a saved JSON gives the same tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.sharded.field import FIELD, missing_package
from benchmarks.sharded.results import MEMORY_CASE, MEMORY_KEYS, SPEED_CASE
from torchddp.bench.gradients import verdict_text
from torchddp.harness.machine import origin
from torchddp.harness.tables import MB, number, plain_table, ratio_text, size_text

HEADINGS = {
    "parameter_bytes": "param-\neters",
    "gradient_bytes": "grad-\nients",
    "bucket_bytes": "\nbuckets",
    "state_bytes": "\nstate",
    "pss_bytes": "resi-\ndent",
    "shared_bytes": "\nshared",
    "peak_bytes": "\npeak",
}
SPEED_NOTE = (
    "A step: zero_grad, forward, backward, AdamW; on the slowest rank. All variants take turns in one process group, "
    "in a new order each round, after a check that they train alike: the last column is the largest difference from "
    "torch-ddp, relative to the change by training. Ratios are medians of per-round ratios."
)
MEMORY_NOTE = (
    "Maximum over ranks, between backward and update. Buckets: as reported by the reducer; gradients may be views of "
    "them. Resident (Pss), shared (RssShmem) and peak of a step (VmHWM): in excess of a process with the variant's "
    "libraries and the bare model, so parameters that stay in place are not included. Shared and peak count shared "
    "memory fully on each rank, resident counts only this rank's share of it."
)


def steps_table(result: dict[str, Any]) -> Table:
    """One model: each variant's step time, and how much its training differs from the reference's."""
    table = plain_table(f"sharded · {size_text(result)}, {result['rounds']} rounds", "variant")
    for heading in ("step p50\nms", "step\np90", "p25..p75", "trains alike\nwithin"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["variants"]:
        if "left_out" in row:
            table.add_row(row["name"], Text("left out", style="yellow"), "", "", "")
            continue
        step = row["step_ms"]
        spread = f"{number(step['q25'])}..{number(step['q75'])}"
        cells = [row["name"], number(step["median"]), number(step["p90"]), spread, f"{row['training_error']:.0e}"]
        table.add_row(*cells, style=_style(row))
    return table


def ratios_table(result: dict[str, Any]) -> Table:
    """Our step time over theirs, and whether each bound holds."""
    table = plain_table("Ratios of whole steps, ours / theirs", "ours")
    table.add_column("against", no_wrap=True)
    table.add_column("which is", no_wrap=True)
    table.add_column(Text("p50 [p25..p75]"), justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    last = ""
    for row in result["comparisons"]:
        shown, last = "" if row["ours"] == last else row["ours"].removeprefix("torchddp-"), row["ours"]
        verdict = verdict_text(row["bound"], row["ratio"])
        table.add_row(shown, row["against"], row["opponent"], ratio_text(row["ratio"]), verdict)
    return table


def memory_table(result: dict[str, Any], *, multiples: bool) -> Table:
    """One model: memory per rank in MB, or in multiples of the model's parameters."""
    unit = "multiples of the parameters" if multiples else "MB"
    table = plain_table(f"memory of a rank, {unit} · {size_text(result)}", "variant")
    for key in MEMORY_KEYS:
        table.add_column(HEADINGS[key], justify="right", no_wrap=True)
    divisor = result["gradient_bytes"] if multiples else MB
    for row in result["variants"]:
        if "left_out" in row:
            table.add_row(row["name"], Text("left out", style="yellow"))
            continue
        values = (row["largest"][key] for key in MEMORY_KEYS)
        cells = ("-" if value is None else f"{value / divisor:.{2 if multiples else 1}f}" for value in values)
        table.add_row(row["name"], *cells, style=_style(row))
    return table


def _style(row: dict[str, Any]) -> str:
    return "bold" if row["role"] == "ours" else ""


def reasons_left_out(result: dict[str, Any]) -> Iterable[Text]:
    """A line for each variant that was left out."""
    for row in result["variants"]:
        if "left_out" in row:
            yield Text(f"{row['name']} is left out: {row['left_out']}", style="yellow")


def bounds_text(result: dict[str, Any]) -> Iterable[Text]:
    """The reason for each bound in the table."""
    for row in result["comparisons"]:
        if row["bound"] is not None:
            yield Text(f"{row['ours']} <= {row['bound']:g} {row['against']}: {row['reason']}.", style="dim")


def field_table() -> Table:
    """The available variants, for --list."""
    table = plain_table("Variants", "name")
    table.add_column("what it is", overflow="fold")
    table.add_column("here", no_wrap=True)
    for name, entry in FIELD.items():
        package = missing_package(entry.variant)
        table.add_row(name, entry.what, Text("not installed", style="yellow") if package else "")
    return table


def _parts(result: dict[str, Any]) -> Iterable[RenderableType]:
    if result["case"] == SPEED_CASE:
        tables = [steps_table(result), *([ratios_table(result)] if result["comparisons"] else [])]
    else:
        tables = [memory_table(result, multiples=False), memory_table(result, multiples=True)]
    for table in tables:
        yield table
        yield ""
    yield from reasons_left_out(result)


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    results: Sequence[dict[str, Any]] = document["results"]
    parts: list[RenderableType] = [part for result in results for part in _parts(result)]
    cases = {result["case"] for result in results}
    if SPEED_CASE in cases:
        most = max((r for r in results if r["case"] == SPEED_CASE), key=lambda result: len(result["comparisons"]))
        parts += [*bounds_text(most), Text(SPEED_NOTE, style="dim")]
    if MEMORY_CASE in cases:
        parts.append(Text(MEMORY_NOTE, style="dim"))
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in document["peers"].items())
    return Group(*parts, *origin(document), Text(versions, style="dim"))
