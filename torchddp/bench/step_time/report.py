"""The table of one model's training steps. Built from a result dict only."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp.harness.tables import number, plain_table, ratio_text, size_text

FOOTNOTE = (
    "step_time: gradients dropped, forward, backward and SGD (learning rate 0: the same work, and weights stay equal), "
    "ms, of the slowest rank. The ratio is of whole steps, per round; that of no DDP is the least anyone could reach."
)


def step_time_table(result: dict[str, Any]) -> Table:
    """Every variant with its step and its ratio to torch's best."""
    table = plain_table(f"step_time · {size_text(result)}, {result['rounds']} rounds", "variant")
    for heading in ("step p50\nms", "step\np90", "step\np99"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(Text("to torch's best\np50 [p25..p75]"), justify="right", no_wrap=True)
    for row in result["variants"]:
        step = row["step_ms"]
        cells = [row["name"], *(number(step[key]) for key in ("median", "p90", "p99"))]
        style = "bold" if row["role"] == "ours" else ""
        table.add_row(*cells, ratio_text(row["ratio_to_best_torch"]), style=style)
    return table
