"""The picture of the case: steps and efficiencies over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchddp.harness.plot_style import COLORS, finish_panel, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^v<>P"
# A line needs more contrast than a bar.
LOCAL_COLOR = "#495057"


def lines(result: dict[str, Any]) -> list[tuple[str, str, list[float], list[float]]]:
    """(name, role, steps in ms, efficiencies) of each variant, over the world sizes."""
    by_size = [size["variants"] for size in result["sizes"]]
    return [
        (
            rows[0]["name"],
            rows[0]["role"],
            [row["step_ms"]["median"] for row in rows],
            [row["efficiency"] for row in rows],
        )
        for rows in zip(*by_size, strict=True)
    ]


def draw_scaling(results: Sequence[dict[str, Any]]) -> Figure:
    """Two panels per model."""
    figure, axes = panels(len(results), 2, 9.0, 3.2 * len(results))
    for row, result in zip(axes, results, strict=True):
        ranks = [size["world_size"] for size in result["sizes"]]
        for index, (name, role, steps_ms, efficiencies) in enumerate(lines(result)):
            marker = MARKERS[index % len(MARKERS)]
            style = {"color": COLORS[role], "marker": marker, "markersize": 4}
            if role == "local":
                style |= {"color": LOCAL_COLOR, "linestyle": "--"}
            row[0].plot(ranks, steps_ms, label=name, **style)
            row[1].plot(ranks, efficiencies, label=name, **style)
        names = [f"{size['world_size']}{'*' if size['oversubscribed'] else ''}" for size in result["sizes"]]
        for axis, label in zip(row, ("step p50, ms", "efficiency, t(1) / t(n)"), strict=True):
            axis.set_xticks(ranks, names)
            axis.set_ylim(bottom=0)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            many = any(size["oversubscribed"] for size in result["sizes"])
            finish_panel(axis, result["title"], "ranks (*: more than cores)" if many else "ranks")
        row[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return figure
