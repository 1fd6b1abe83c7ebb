"""The printed tables. Built from the document only, so that a saved JSON gives the same tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.links.field import PLANNED
from torchddp.harness.machine import origin
from torchddp.harness.tables import number, plain_table, ratio_text, size_text

# We claim that planned buckets are this close to the best of the sweep, and predictions this close to measurements.
GOAL_TO_BEST, GOAL_ERROR = 1.05, 0.15


def place_table(result: dict[str, Any]) -> Table:
    """One model over one link: every variant's step time."""
    table = plain_table(
        f"{result['place']} · {size_text(result)} over {result['transport']}, {result['rounds']} rounds", "variant"
    )
    for heading in ("step p50\nms", "step\np90"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["variants"]:
        style = "bold" if row["name"] == PLANNED else ""
        table.add_row(row["name"], number(row["step_ms"]["median"]), number(row["step_ms"]["p90"]), style=style)
    return table


def summary_table(results: list[dict[str, Any]]) -> Table:
    """Planned buckets compared with the best of the sweep and torch's default, at every place."""
    table = plain_table("Planned buckets (bucket_cap_mb='auto'), whole steps", "place")
    for heading in (
        "model",
        "buckets",
        "best of\nthe sweep",
        "planned / best\np50 [p25..p75]",
        "planned / torch default",
    ):
        table.add_column(Text(heading), justify="left" if heading == "model" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result["place"],
            result["model"],
            str(len(result["planned_bytes"])),
            result["best_of_sweep"].removeprefix("torchddp, "),
            ratio_text(result["planned_to_best"]),
            ratio_text(result["planned_to_torch_default"]),
        )
    return table


def predictions_table(rows: list[dict[str, Any]]) -> Table:
    """The simulator's predictions and the measurements."""
    table = plain_table("Predicted steps (`torchddp simulate`) and measured ones", "recorded over")
    for heading in ("predicted for", "model", "predicted, ms", "measured, ms", "error"):
        table.add_column(heading, justify="left" if heading in ("model", "predicted for") else "right", no_wrap=True)
    for row in rows:
        style = "green" if abs(row["error"]) <= GOAL_ERROR else "red"
        table.add_row(
            row["recorded_over"],
            row["predicted_for"],
            row["model"],
            number(row["predicted_ms"]),
            number(row["measured_ms"]),
            Text(f"{row['error']:+.0%}", style=style),
        )
    return table


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    tables = [*map(place_table, document["results"]), summary_table(document["results"])]
    if document["predictions"]:
        tables.append(predictions_table(document["predictions"]))
    parts: list[RenderableType] = []
    for table in tables:
        parts += [table, ""]
    return Group(*parts, *origin(document))
