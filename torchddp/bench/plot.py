"""One picture per case: bars with their spread, or curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchddp.bench.collective.names import IMPLEMENTATIONS
from torchddp.bench.collective.operations import size_text
from torchddp.bench.overlap.plot import draw_overlap
from torchddp.bench.scaling.plot import draw_scaling
from torchddp.harness.plot_style import COLORS, bar_panels, finish_panel, panels
from torchddp.harness.tables import MB, ranks_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVE_COLORS = dict(zip(IMPLEMENTATIONS, ("#9aa5b1", "#4c6ef5", "#d9480f"), strict=True))
# By case: the summary that a bar shows; a cost elsewhere.
BAR_KEYS = {"step_time": "step_ms", "startup": "total_ms"}
BAR_LABELS = {
    "memory": "MB beyond no DDP",
    "step_time": "step, ms (p25..p75)",
    "startup": "constructor and two steps, ms (p25..p75)",
}


def bars(result: dict[str, Any]) -> list[tuple[str, str, float, float, float]]:
    """(name, role, height, below, above) of each bar; the spread reaches from p25 to p75."""
    key = BAR_KEYS.get(result["case"], "cost")
    found = []
    for row in result["variants"]:
        if row["role"] == "local" and key != "step_ms":
            continue
        if result["case"] == "memory":
            found.append((row["name"], row["role"], row["extra_bytes"] / MB, 0.0, 0.0))
        else:
            times = row[key]
            median = times["median"]
            found.append((row["name"], row["role"], median, median - times["q25"], times["q75"] - median))
    return found


def curve(result: dict[str, Any], name: str) -> tuple[list[int], list[float], list[float]]:
    """Message sizes in bytes, times in us and busbw in GB/s of one implementation."""
    points = [
        (size["bytes"], row["time_us"]["median"], row["busbw_gb_per_s"])
        for size in result["sizes"]
        for row in size["implementations"]
        if row["name"] == name
    ]
    return [p[0] for p in points], [p[1] for p in points], [p[2] for p in points]


def draw_plot(results: Sequence[dict[str, Any]]) -> Figure:
    """The picture of one case."""
    return DRAWERS.get(results[0]["case"], _draw_bars)(results)


def save_plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The picture of one case, as a file."""
    from matplotlib import pyplot

    figure = draw_plot(results)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_curves(results: Sequence[dict[str, Any]]) -> Figure:
    """Time and busbw over message size, one row per operation."""
    figure, axes = panels(len(results), 2, 9.0, 3.2 * len(results))
    for row, result in zip(axes, results, strict=True):
        for name in IMPLEMENTATIONS:
            sizes, *values = curve(result, name)
            for axis, heights in zip(row, values, strict=True):
                if any(height > 0 for height in heights):
                    axis.plot(sizes, heights, marker="o", markersize=3, color=CURVE_COLORS[name], label=name)
        all_sizes = [size["bytes"] for size in result["sizes"]]
        for axis, label in zip(row, ("time p50, us", "busbw, GB/s"), strict=True):
            axis.set_xscale("log", base=4)
            axis.set_yscale("log")
            axis.set_xticks(all_sizes, [size_text(size) for size in all_sizes], rotation=45, fontsize=7)
            axis.minorticks_off()
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            finish_panel(axis, f"{result['operation']}, {ranks_text(result['world_size'])}", "message size")
        row[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return figure


def _draw_bars(results: Sequence[dict[str, Any]]) -> Figure:
    """One panel per model, side by side."""
    figure, axes = bar_panels(len(results), max(len(result["variants"]) for result in results))
    for axis, result in zip(axes, results, strict=True):
        entries = bars(result)
        positions = range(len(entries))
        axis.barh(
            positions,
            [entry[2] for entry in entries],
            xerr=[[entry[3] for entry in entries], [entry[4] for entry in entries]],
            color=[COLORS[entry[1]] for entry in entries],
            error_kw={"elinewidth": 1, "capsize": 2},
        )
        axis.set_yticks(positions, [entry[0] for entry in entries])
        label = BAR_LABELS.get(result["case"]) or f"cost, {result['unit']} (p25..p75)"
        finish_panel(axis, f"{result['title']}, {ranks_text(result['world_size'])}", label)
    axes[0].invert_yaxis()
    figure.tight_layout()
    return figure


# By case, where the picture is not one of bars.
DRAWERS: dict[str, Callable[[Sequence[dict[str, Any]]], Any]] = {
    "overlap": draw_overlap,
    "collective": _draw_curves,
    "scaling": draw_scaling,
}
