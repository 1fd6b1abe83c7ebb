"""The table of one model. Built from a result dict only."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp.bench.startup.results import CLOCKS
from torchddp.harness.tables import number, plain_table, ratio_text, size_text

FOOTNOTE = (
    "startup: p50 in ms of the slowest rank, every variant built anew in each round, in a process that has built "
    "each before: importing the package and opening the process group are not in it. Steps are forward and backward. "
    "total: the sum of a round; the ratio is of it."
)


def startup_table(result: dict[str, Any]) -> Table:
    """Every variant: its constructor, its first two steps, and their sum."""
    table = plain_table(f"startup · {size_text(result)}, {result['rounds']} rounds", "variant")
    for heading in ("con-\nstructor", "step 1", "step 2", "total\np50", "total\np90"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(Text("to torch's best\np50 [p25..p75]"), justify="right", no_wrap=True)
    for row in result["variants"]:
        cells = [row["name"], *(number(row[clock]["median"]) for clock in CLOCKS)]
        cells += [number(row["total_ms"]["median"]), number(row["total_ms"]["p90"])]
        if row["role"] == "local":
            cells[1] = ""
        style = "bold" if row["role"] == "ours" else ""
        table.add_row(*cells, ratio_text(row["ratio_to_best_torch"]), style=style)
    return table
