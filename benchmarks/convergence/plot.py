"""Plots held-out loss against data seen and against bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchddp.harness.plots import finish_panel, panels


def known(curve: Sequence[dict[str, float | None]], key: str) -> tuple[list[float], list[float]]:
    """The values of `key` and the losses, for the points that have both and a nonzero x."""
    points = [(point[key], point["loss"]) for point in curve if point[key]]
    return [x for x, _ in points if x is not None], [loss for _, loss in points if loss is not None]


def save_convergence(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A row of panels per task."""
    from matplotlib import pyplot

    figure, axes = panels(len(results), 2, 11.0, 4.2 * len(results))
    for row, result in zip(axes, results, strict=True):
        ran = [method for method in result["methods"] if "curve" in method]
        colors = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
        for axis, key, label in zip(
            row, ("units", "bytes"), (f"{result['unit']} seen", "bytes sent by a rank"), strict=True
        ):
            for index, method in enumerate(ran):
                xs, losses = known(method["curve"], key)
                axis.plot(xs, losses, marker="o", markersize=2, linewidth=1, color=colors[index], label=method["name"])
            axis.set_ylabel("held-out loss")
            axis.grid(alpha=0.3)
            finish_panel(axis, f"{result['title']}, {result['seeds']} seeds", label)
        row[1].set_xscale("log")
        row[0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
