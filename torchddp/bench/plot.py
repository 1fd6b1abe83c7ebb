"""One picture per case: bars with their spread, or curves over message sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchddp.bench.collective.names import IMPLEMENTATIONS
from torchddp.bench.collective.operations import size_text
from torchddp.bench.tables import ranks_text

COLORS = {"torch": "#9aa5b1", "ours": "#d9480f", "peer": "#4c6ef5", "local": "#dee2e6"}
CURVE_COLORS = dict(zip(IMPLEMENTATIONS, ("#9aa5b1", "#4c6ef5", "#d9480f"), strict=True))


def bars(result: dict[str, Any]) -> list[tuple[str, str, float, float, float]]:
    """(name, role, height, below, above) of each bar; the spread reaches from p25 to p75."""
    found = []
    for row in result["variants"]:
        if row["role"] == "local":
            continue
        if result["case"] == "memory":
            found.append((row["name"], row["role"], row["extra_bytes"] / 1e6, 0.0, 0.0))
        else:
            cost = row["cost"]
            median = cost["median"]
            found.append((row["name"], row["role"], median, median - cost["q25"], cost["q75"] - median))
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


def save_plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The picture of one case."""
    import matplotlib

    matplotlib.use("Agg")
    if results[0]["case"] == "collective":
        _save_curves(results, path)
    else:
        _save_bars(results, path)


def _save_curves(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Time and busbw over message size, one row per operation."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), 2, figsize=(9.0, 3.2 * len(results)), squeeze=False)
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
            axis.set_xlabel("message size")
            axis.set_ylabel(label)
            axis.set_title(f"{result['operation']}, {ranks_text(result['world_size'])}", fontsize=9)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _save_bars(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per model, side by side."""
    from matplotlib import pyplot

    count = max(len(result["variants"]) for result in results)
    figure, axes = pyplot.subplots(
        1, len(results), figsize=(2.0 + 3.4 * len(results), 1.2 + 0.36 * count), sharey=True, squeeze=False
    )
    for axis, result in zip(axes[0], results, strict=True):
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
        axis.set_title(f"{result['title']}, {ranks_text(result['world_size'])}", fontsize=9)
        axis.set_xlabel("MB beyond no DDP" if result["case"] == "memory" else f"cost, {result['unit']} (p25..p75)")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
