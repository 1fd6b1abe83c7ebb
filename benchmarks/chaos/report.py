"""The printed table. Built from the document only, so that a saved JSON gives the same table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.chaos.judge import COLUMNS
from benchmarks.chaos.plan import KINDS, OVER
from torchddp.harness.machine import origin
from torchddp.harness.tables import plain_table

NOTE = (
    "worst: seconds from the fault to the last rank's error (over torchft, to its first step without the lost "
    "replica); '-' if the job must continue. named: trials whose errors named the right rank, of those in which ranks "
    "can know it."
)


def _failures(rows: Sequence[dict[str, Any]]) -> str:
    reasons = Counter(column for row in rows for column in COLUMNS if column in row["problems"])
    return ", ".join(f"{count} {column}" for column, count in reasons.items())


def _by_cell(rows: Sequence[dict[str, Any]]) -> Iterable[tuple[str, str, list[dict[str, Any]]]]:
    kinds = list(dict.fromkeys([*KINDS, *(row["kind"] for row in rows)]))
    for kind in kinds:
        for over in OVER:
            cell = [row for row in rows if (row["kind"], row["over"]) == (kind, over)]
            if cell:
                yield kind, over, cell


def _add(table: Table, kind: str, over: str, rows: Sequence[dict[str, Any]]) -> None:
    passed = sum(row["passed"] for row in rows)
    worst = max((row["detection_s"] for row in rows if row["detection_s"] is not None), default=None)
    nameable = [row for row in rows if row["nameable"]]
    named = sum("named" not in row["problems"] for row in nameable)
    table.add_row(
        kind,
        over,
        str(len(rows)),
        Text(str(passed), style="green" if passed == len(rows) else "red"),
        "-" if worst is None else f"{worst:.2f}",
        f"{named}/{len(nameable)}" if nameable else "-",
        Text(_failures(rows), style="red"),
    )


def table_of(document: dict[str, Any]) -> Table:
    """Trials by kind of fault and transport."""
    rows = document["results"]
    took_min = sum(row["took_s"] for row in rows) / 60
    table = plain_table(f"{len(rows)} trials, seed {document['settings']['seed']}, {took_min:.1f} min", "fault")
    for heading in ("over", "trials", "passed", "worst\ns", "named", "failures"):
        left = heading in ("over", "failures")
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for kind, over, cell in _by_cell(rows):
        _add(table, kind, over, cell)
    table.add_section()
    _add(table, "all", "", rows)
    return table


def failure_text(row: dict[str, Any], repeat: str) -> Text:
    """One failed trial: what was wrong, and the command that repeats it."""
    text = Text(f"failed: {row['what']}\n", style="red")
    for column, problem in row["problems"].items():
        text.append(f"  {column}: {' '.join(problem.split())[:400]}\n", style="default")
    return text.append(f"  {repeat} --only {row['number']}", style="dim")


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [table_of(document), "", Text(NOTE, style="dim")]
    parts += [Text(f"left out: {text}", style="yellow") for text in document["left_out"]]
    return Group(*parts, *origin(document))
