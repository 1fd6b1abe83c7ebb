"""The table and the plot of a collective's results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from torchddp.bench.collective.implementations import GLOO, OURS, SHM, SHM_BACKEND
from torchddp.bench.collective.operations import size_text
from torchddp.bench.collective.peers import DEEPSPEED, MPICH, OPEN_MPI, VLLM
from torchddp.harness.plots import finish_panel, panels
from torchddp.harness.tables import number, plain_table, ranks_text, ratio_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In the order of the legend. Ours have warm colors and are drawn last.
CURVE_COLORS = {
    GLOO: "#9aa5b1",
    "c10d": "#4c6ef5",
    MPICH: "#2f9e44",
    OPEN_MPI: "#1098ad",
    VLLM: "#9c36b5",
    DEEPSPEED: "#495057",
    SHM: "#d9480f",
    SHM_BACKEND: "#f59f00",
}


def _notes(result: dict[str, Any]) -> list[str]:
    notes = [f"{name} not available: {reason}" for name, reason in result["unavailable"].items()]
    ranks, processors = result["world_size"], result["processors"]
    if ranks > processors:
        notes.append(f"{ranks} ranks share {processors} processors")
    notes += [f"{name}: {remark}" for name, remark in result["remarks"].items()]
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
    # The last cell goes into the widest column.
    return [size, name, *[""] * 5, Text("not available", style="dim")]


def _ratio(row: dict[str, Any], size: dict[str, Any], peers: bool) -> str | Text:
    if not peers:
        return ratio_text(row["ratio_to_gloo"], without="1")
    if row["name"] in OURS:
        return ratio_text(row["best_peer_ratio"])
    return ratio_text(None, without="1 (best peer)") if row["name"] == size["best_peer"] else ""


def _cells(text: str, row: dict[str, Any], size: dict[str, Any], peers: bool) -> list[str | Text]:
    over_roofline = row["over_roofline"]
    return [
        text,
        row["name"],
        number(row["time_us"]["median"]),
        number(row["time_us"]["p99"]),
        number(row["slowest_rank_us"]["median"]),
        number(row["algbw_gb_per_s"]),
        number(row["busbw_gb_per_s"]),
        _ratio(row, size, peers),
        "" if over_roofline is None else f"{over_roofline:.2f}",
    ]


def collective_table(result: dict[str, Any]) -> Table:
    counts = sorted({size["rounds"] for size in result["sizes"]})
    rounds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
    title = f"collective · {result['operation']}, fp32, {ranks_text(result['world_size'])}, {rounds} rounds"
    against = "vs best peer" if result["peers"] else "vs gloo"
    headings = ["p50\nus", "p99\nus", "slow\np50", "alg\nGB/s", "bus\nGB/s", f"{against}\np50 [p25..p75]"]
    if any(size["roofline_us"] is not None for size in result["sizes"]):
        headings.append("x\nroof")
    table = plain_table(title, "size", *headings, second="", notes=_notes(result))
    for size in result["sizes"]:
        text = size_text(size["bytes"])
        for row in size["implementations"]:
            cells = _cells(text, row, size, result["peers"])[: len(table.columns)]
            table.add_row(*cells, style="bold" if row["name"] in OURS else "")
            text = ""
        for name in size["unavailable"]:
            table.add_row(*_not_available(text, name))
        table.add_section()
    for name in result["unavailable"]:
        table.add_row(*_not_available("all", name))
    return table


def curve(result: dict[str, Any], name: str) -> tuple[list[int], list[float], list[float]]:
    """One implementation's message sizes in bytes, times in us and busbw in GB/s."""
    points = [
        (size["bytes"], row["time_us"]["median"], row["busbw_gb_per_s"])
        for size in result["sizes"]
        for row in size["implementations"]
        if row["name"] == name
    ]
    return [p[0] for p in points], [p[1] for p in points], [p[2] for p in points]


def draw_curves(results: Sequence[dict[str, Any]]) -> Figure:
    """Time and busbw against message size, one row of panels per operation."""
    figure, axes = panels(len(results), 2, 10.0, 3.2 * len(results))
    for row, result in zip(axes, results, strict=True):
        for name, color in CURVE_COLORS.items():
            sizes, *values = curve(result, name)
            for axis, heights in zip(row, values, strict=True):
                if any(height > 0 for height in heights):
                    axis.plot(sizes, heights, marker="o", markersize=3, color=color, label=name)
        all_sizes = [size["bytes"] for size in result["sizes"]]
        for axis, label in zip(row, ("time p50, us", "busbw, GB/s"), strict=True):
            axis.set_xscale("log", base=4)
            axis.set_yscale("log")
            axis.set_xticks(all_sizes, [size_text(size) for size in all_sizes], rotation=45, fontsize=7)
            axis.minorticks_off()
            finish_panel(axis, f"{result['operation']}, {ranks_text(result['world_size'])}", "message size", label)
        # Outside the axes, because the curves reach into every corner.
        handles, names = row[0].get_legend_handles_labels()
        row[1].legend(handles, names, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
