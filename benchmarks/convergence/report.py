"""The printed tables, for a terminal and in markdown. Built from the document only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.training.tables import bytes_text, holds_text, markdown_table
from torchddp.harness.machine import origin
from torchddp.harness.tables import plain_table, ranks_text

NOTE = (
    "All methods start from the same weights, see the same data in the same order, and are evaluated on the same "
    "held-out set. sent: bytes per rank, as counted by its transport or hook. ratio: the final loss over that of the "
    "uncompressed run with the same seed, mean and [lowest..highest] over the seeds. The bound applies to the mean."
)
HEADINGS = ("method", "sent a step", "loss", "ratio", "bound", "within bound")


def heading(result: dict[str, Any]) -> str:
    """The title of a task's table: the model and the length of training."""
    seeds = result["seeds"]
    return (
        f"{result['title']}: {result['parameters']:,} parameters, {ranks_text(result['world_size'])}, "
        f"{result['steps']} steps of {result['units_per_step']:,} {result['unit']}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}"
    )


def cells(row: dict[str, Any]) -> list[str]:
    """A method's row, in the order of HEADINGS."""
    bound = "" if row["bound"] is None else f"{row['bound']:g}"
    if "error" in row:
        return [row["name"], "", "error", "", bound, holds_text(row["holds"])]
    ratio = row["ratio"]
    spread = "" if ratio is None else f"{ratio['mean']:.4f} [{ratio['low']:.4f}..{ratio['high']:.4f}]"
    return [
        row["name"],
        bytes_text(row["bytes_per_step"]),
        f"{row['loss']:.4f}",
        spread,
        bound,
        holds_text(row["holds"]),
    ]


def task_table(result: dict[str, Any]) -> Table:
    """One task: each method's bytes and loss."""
    table = plain_table(heading(result), HEADINGS[0])
    for name in HEADINGS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["methods"]:
        style = "" if row["holds"] is None else "green" if row["holds"] else "red"
        *rest, holds = cells(row)
        table.add_row(*map(Text, rest), Text(holds, style=style))
    return table


def _errors(results: Sequence[dict[str, Any]]) -> Iterable[Text]:
    for result in results:
        for row in result["methods"]:
            if "error" in row:
                yield Text(f"{result['task']}, {row['name']}: {row['error']}", style="red")


def _reasons(result: dict[str, Any]) -> Iterable[Text]:
    for row in result["methods"]:
        if row["bound"] is not None:
            yield Text(f"{row['name']} <= {row['bound']:g}: {row['reason']}.", style="dim")


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    results = document["results"]
    parts: list[RenderableType] = [part for result in results for part in (task_table(result), "")]
    return Group(*parts, *_errors(results), *_reasons(results[0]), Text(NOTE, style="dim"), *origin(document))


def markdown(document: dict[str, Any]) -> str:
    """The tables for a documentation page, with the origin of their numbers."""
    parts = []
    for result in document["results"]:
        parts += [f"{heading(result)}:", "", markdown_table(HEADINGS, [cells(row) for row in result["methods"]]), ""]
    machine = document["machine"]
    made = f"`{document['command']}`, {document['date'][:10]}, {machine['cpu']}, {machine['cores']} cores"
    return "\n".join([*parts, f"Made by {made}, torch {machine['torch']}."])
