"""The table of one collective. Built from a result dict only."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from torchddp.bench.collective.names import GLOO
from torchddp.bench.collective.operations import size_text
from torchddp.harness.tables import number, plain_table, ranks_text, ratio_text

FOOTNOTE = (
    "collective: fp32, times of rank 0, each implementation in turn on memory of its own kind; with few rounds p99 is "
    "the slowest. GB/s from p50; bus as nccl-tests counts it; vs gloo per round. x roof: p50 over the time in which "
    "the same ranks, each copying within its own memory, move the bytes that an all-reduce in shared memory must."
)


def _rounds(result: dict[str, Any]) -> str:
    rounds = sorted({size["rounds"] for size in result["sizes"]})
    return f"{rounds[0]} to {rounds[-1]} rounds" if len(rounds) > 1 else f"{rounds[0]} rounds"


def _notes(result: dict[str, Any]) -> list[str]:
    """Why a line is missing, and what the roofline was made of."""
    notes = [f"{name} not available: {reason}" for name, reason in result["unavailable"].items()]
    measured = []
    for size in result["sizes"]:
        text = size_text(size["bytes"])
        notes += [f"{name} not available at {text}: {reason}" for name, reason in size["unavailable"].items()]
        if size["memory_gb_per_s"] is not None:
            measured.append(f"{number(size['memory_gb_per_s'])} GB/s at {text}")
    if measured:
        notes.append(f"memory bandwidth, all ranks copying at once: {', '.join(measured)}")
    return notes


def _not_available(size: str, name: str) -> list[str | Text]:
    return [size, name, Text("not available", style="dim")]


def _cells(size: str, row: dict[str, Any]) -> list[str | Text]:
    over_roofline = row["over_roofline"]
    return [
        size,
        row["name"],
        number(row["time_us"]["median"]),
        number(row["time_us"]["p99"]),
        number(row["algbw_gb_per_s"]),
        number(row["busbw_gb_per_s"]),
        ratio_text(row["ratio_to_gloo"], without="1"),
        "" if over_roofline is None else f"{over_roofline:.2f}",
    ]


def collective_table(result: dict[str, Any]) -> Table:
    """One operation: every size, every implementation, and the reasons of those that are not there."""
    title = f"collective · {result['operation']}, fp32, {ranks_text(result['world_size'])}, {_rounds(result)}"
    table = plain_table(title, "size")
    table.columns[0].no_wrap = True
    table.add_column("", no_wrap=True)
    headings = ["p50\nus", "p99\nus", "alg\nGB/s", "bus\nGB/s", "vs gloo\np50 [p25..p75]"]
    if any(size["roofline_us"] is not None for size in result["sizes"]):
        headings.append("x\nroof")
    for heading in headings:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for size in result["sizes"]:
        text = size_text(size["bytes"])
        for row in size["implementations"]:
            table.add_row(*_cells(text, row)[: len(table.columns)], style="" if row["name"] == GLOO else "bold")
            text = ""
        for name in size["unavailable"]:
            table.add_row(*_not_available(text, name))
        table.add_section()
    for name in result["unavailable"]:
        table.add_row(*_not_available("all", name))
    if notes := _notes(result):
        table.caption = Text("\n".join(notes), style="dim")
        table.caption_justify = "left"
    return table
