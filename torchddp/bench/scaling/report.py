"""The table of one model. Built from a result dict only."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp.harness.tables import number, plain_table, ranks_text, ratio_text, weight_text

FOOTNOTE = (
    "scaling: training steps as in step_time, a launch for each number of ranks. Efficiency is the step of one rank "
    "over that of n, of the same class (weak scaling: every rank keeps its batch): times of different launches, so "
    "the machine's drift is in it. Ratios are within a launch."
)
OVERSUBSCRIBED = "* more ranks than cores: they take turns, and the step shows that first of all."


def scaling_table(result: dict[str, Any]) -> Table:
    """Every number of ranks, every variant: its step, its efficiency and its ratio to torch's best."""
    table = plain_table(f"scaling · {weight_text(result)}", "ranks")
    table.columns[0].no_wrap = True
    table.add_column("variant", overflow="fold")
    for heading in ("step p50\nms", "step\np90", "effi-\nciency"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(Text("to torch's best\np50 [p25..p75]"), justify="right", no_wrap=True)
    for size in result["sizes"]:
        ranks = f"{size['world_size']}{'*' if size['oversubscribed'] else ''}"
        for row in size["variants"]:
            cells = [ranks, row["name"], number(row["step_ms"]["median"]), number(row["step_ms"]["p90"])]
            cells.append(f"{row['efficiency']:.0%}")
            style = "bold" if row["role"] == "ours" else ""
            table.add_row(*cells, ratio_text(row["ratio_to_best_torch"]), style=style)
            ranks = ""
        table.add_section()
    rounds = ", ".join(f"{size['rounds']} with {ranks_text(size['world_size'])}" for size in result["sizes"])
    notes = [f"rounds: {rounds}"]
    if any(size["oversubscribed"] for size in result["sizes"]):
        notes.append(OVERSUBSCRIBED)
    table.caption = Text("\n".join(notes), style="dim")
    table.caption_justify = "left"
    return table
