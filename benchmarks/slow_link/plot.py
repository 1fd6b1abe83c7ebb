"""Plots loss against seconds and against steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchddp.harness.plots import finish_panel, panels


def save_slow_link(result: dict[str, Any], path: Path) -> None:
    """Two panels, with a line at the target loss."""
    from matplotlib import pyplot

    figure, axes = panels(1, 2, 11.0, 4.2, sharey=True)
    ran = [row for row in result["methods"] if "points" in row]
    for axis, place, label in zip(axes[0], (1, 0), ("seconds of training", "steps"), strict=True):
        for row in ran:
            trained = row["points"][1:]
            xs, losses = [point[place] for point in trained], [point[2] for point in trained]
            style = "--" if row["name"].startswith("torch-") else "-"
            axis.plot(xs, losses, style, marker="o", markersize=2, linewidth=1, label=row["name"])
        axis.axhline(result["target"], color="#868e96", linewidth=1)
        axis.set_ylabel("held-out loss")
        axis.grid(alpha=0.3)
        finish_panel(axis, result["title"], label)
    if ran:
        axes[0][0].set_xscale("log")
        for which in ("major", "minor"):
            getattr(axes[0][0].xaxis, f"set_{which}_formatter")("{x:g}")
            axes[0][0].tick_params(axis="x", which=which, labelsize=7)
        axes[0][0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
