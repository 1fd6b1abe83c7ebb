"""The table of one model. Built from a result dict only."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp.harness.tables import number, plain_table, size_text

FOOTNOTE = (
    "overlap: compute is the bare model's step (forward and backward) and exposed what the class adds to it. comm "
    "alone is what the class adds to a step without computation, whose backward hands out the same gradients all at "
    "once: hooks, packing and reduction with nothing to hide behind. hidden: 1 - exposed / comm alone, per round; "
    "beyond 0 or 100% it is shown as these, and kept as it is in JSON."
)


def _percent(value: float | None) -> str:
    # No share can be told where the reduction alone cost nothing.
    return "?" if value is None else f"{100 * min(max(value, 0.0), 1.0):.0f}%"


def hidden_text(hidden: dict[str, Any]) -> str:
    """'86% [80%..91%]', within 0 and 100%."""
    return f"{_percent(hidden['median'])} [{_percent(hidden['q25'])}..{_percent(hidden['q75'])}]"


def overlap_table(result: dict[str, Any]) -> Table:
    """Every variant: its step, what of it is exposed, what there was to hide, and the share that was hidden."""
    table = plain_table(f"overlap · {size_text(result)}, {result['rounds']} rounds", "variant")
    for heading in ("step p50\nms", "exposed\np50 ms", "exposed\np90", "comm alone\np50 ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(Text("hidden\np50 [p25..p75]"), justify="right", no_wrap=True)
    for row in result["variants"]:
        cells = [row["name"], number(row["step_ms"]["median"])]
        if row["role"] == "local":
            table.add_row(*cells, Text("compute", style="dim"), "", "", "")
            continue
        exposed = row["exposed_ms"]
        cells += [number(exposed["median"]), number(exposed["p90"]), number(row["comm_ms"]["median"])]
        table.add_row(*cells, hidden_text(row["hidden"]), style="bold" if row["role"] == "ours" else "")
    return table
