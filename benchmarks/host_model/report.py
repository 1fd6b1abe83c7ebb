"""The printed tables. Built from the document only, so that a saved JSON gives the same tables."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchddp.harness.machine import origin
from torchddp.harness.tables import plain_table


def bytes_text(nbytes: int) -> str:
    """'64 B', '1 KiB', '64 MiB', '8 GiB'."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.3g} {unit}"
    return f"{nbytes} B"


def nodes_text(nodes: int) -> str:
    return f"{nodes} node{'s' if nodes > 1 else ''}"


def _title(rows: list[dict[str, Any]]) -> str:
    return f"One all-reduce of {bytes_text(rows[0]['message_bytes'])}, {nodes_text(rows[0]['nodes'])}"


def lines_table(rows: list[dict[str, Any]]) -> Table:
    """A small all-reduce: cache lines."""
    table = plain_table(_title(rows), "ranks", "lines", "across\nthe link", "in a row", second="scheme")
    for row in rows:
        numbers = (row["lines"], row["far_lines"], row["lines_in_a_row"])
        table.add_row(str(row["ranks"]), row["scheme"], *map(str, numbers))
    return table


def blocks_table(rows: list[dict[str, Any]]) -> Table:
    """A large all-reduce: bytes of blocks."""
    table = plain_table(_title(rows), "ranks", "by a rank", "across\nthe link", "lines", second="scheme")
    for row in rows:
        volumes = (row["bytes"] // row["ranks"], row["far_bytes"])
        table.add_row(str(row["ranks"]), row["scheme"], *map(bytes_text, volumes), str(row["lines"]))
    return table


def counts_table(compared: list[dict[str, Any]]) -> Table:
    """The counts of the C++ tests next to the model's."""
    table = plain_table("Counted / model", "all-reduce", "in all", "across the link")
    for row in compared:
        what = f"{bytes_text(row['message_bytes'])}, {row['ranks']} ranks, {nodes_text(row['nodes'])}"
        unit, names = (" lines", ("lines", "far_lines")) if "lines" in row else (" B", ("bytes", "far_bytes"))
        cells = []
        for pair in (row[name] for name in names):
            style = "green" if pair["counted"] == pair["model"] else "red"
            cells.append(Text(f"{pair['counted']} / {pair['model']}{unit}", style=style))
        table.add_row(what, *cells)
    return table


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    by_place: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in document["results"]:
        by_place.setdefault((row["message_bytes"], row["nodes"]), []).append(row)
    parts: list[RenderableType] = []
    for rows in by_place.values():
        is_small = all(row["lines_in_a_row"] is not None for row in rows)
        parts += [lines_table(rows) if is_small else blocks_table(rows), ""]
    if document["counts"]:
        parts += [counts_table(document["counts"]), ""]
    return Group(*parts, Text("Formulas, not measurements: benchmarks/host_model/model.py."), *origin(document))
