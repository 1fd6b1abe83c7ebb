"""The printed tables. Built from the document only, so that a saved JSON gives the same tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.checks.field import CHECKED
from torchddp.harness.machine import origin
from torchddp.harness.tables import number, plain_table, size_text

# We claim that a check adds less than this fraction of a step.
GOAL = 0.02


def _ratio_text(row: dict[str, Any]) -> Text:
    ratio = row["to_plain"]
    if ratio is None:
        return Text("", style="dim")
    style = "" if row["name"] == CHECKED else "green" if ratio["median"] <= 1 + GOAL else "red"
    return Text(f"{ratio['median']:.3f} [{ratio['q25']:.3f}..{ratio['q75']:.3f}]", style=style)


def model_table(result: dict[str, Any]) -> Table:
    """One model: every variant's step time and its ratio to the plain step."""
    table = plain_table(f"{size_text(result)}, {result['rounds']} rounds", "variant")
    for heading in ("step p50\nms", "step / plain\np50 [p25..p75]"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for row in result["variants"]:
        table.add_row(row["name"], number(row["step_ms"]["median"]), _ratio_text(row))
    return table


def check_text(result: dict[str, Any]) -> Text:
    """The cost of check_parameters_every."""
    check, share = result["check_ms"], result["check_share"]
    text = (
        f"One check of parameters: {number(check['median'])} ms [{number(check['q25'])}..{number(check['q75'])}]; "
        f"check_parameters_every={result['every']}: {share:+.2%} of a step"
    )
    return Text(text, style="green" if share <= GOAL else "red")


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = []
    for result in document["results"]:
        parts += [model_table(result), check_text(result), ""]
    return Group(*parts, *origin(document))
