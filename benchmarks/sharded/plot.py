"""Plots a bar per variant: its step time, or its memory per rank by kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchddp.harness.plots import COLORS, bar_panels, finish_panel
from torchddp.harness.tables import MB, ranks_text

HELD_COLORS = {"parameter_bytes": "#dee2e6", "gradient_bytes": "#4c6ef5", "state_bytes": "#d9480f"}


def save_speed(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per model: median step times with their quartiles."""
    rows = [[row for row in result["variants"] if "step_ms" in row] for result in results]
    # Panels share their y axis, so a variant that ran on only one model keeps its position on all.
    names = list(dict.fromkeys(row["name"] for panel in rows for row in panel))
    figure, axes = bar_panels(len(results), len(names))
    for axis, result, panel in zip(axes, results, rows, strict=True):
        steps = [row["step_ms"] for row in panel]
        medians = [step["median"] for step in steps]
        below = [step["median"] - step["q25"] for step in steps]
        above = [step["q75"] - step["median"] for step in steps]
        axis.barh(
            [names.index(row["name"]) for row in panel],
            medians,
            xerr=[below, above],
            color=[COLORS[row["role"]] for row in panel],
            error_kw={"elinewidth": 1, "capsize": 2},
        )
        finish_panel(axis, f"{result['title']}, {ranks_text(result['world_size'])}", "step, ms (p25..p75)")
    _save(figure, axes, names, path)


def save_memory(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per model and world size: a rank's parameters, gradients and state, stacked, and its peak."""
    rows = [[row for row in result["variants"] if "largest" in row] for result in results]
    names = list(dict.fromkeys(row["name"] for panel in rows for row in panel))
    figure, axes = bar_panels(len(results), len(names))
    for axis, result, panel in zip(axes, results, rows, strict=True):
        positions = [names.index(row["name"]) for row in panel]
        left = [0.0] * len(panel)
        for key, color in HELD_COLORS.items():
            widths = [row["largest"][key] / MB for row in panel]
            axis.barh(positions, widths, left=left, color=color, label=key.removesuffix("_bytes"))
            left = [start + width for start, width in zip(left, widths, strict=True)]
        peaks = [row["largest"]["peak_bytes"] / MB for row in panel]
        axis.plot(peaks, positions, "|", color="black", markersize=9, label="peak above the bare model")
        finish_panel(axis, f"{result['title']}, {ranks_text(result['world_size'])}", "MB of a rank")
    axes[0].legend(fontsize=6, frameon=False)
    _save(figure, axes, names, path)


def _save(figure: Any, axes: Any, names: Sequence[str], path: Path) -> None:
    from matplotlib import pyplot

    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
