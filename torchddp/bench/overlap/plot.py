"""The picture of the case: what there was to hide, and on it what stayed exposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchddp.harness.plot_style import COLORS, bar_panels, finish_panel
from torchddp.harness.tables import ranks_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_overlap(results: Sequence[dict[str, Any]]) -> Figure:
    """One panel per model: per variant a pale bar, communication alone, and a full one, the exposed part."""
    figure, axes = bar_panels(len(results), 1 + max(len(result["variants"]) for result in results))
    for axis, result in zip(axes, results, strict=True):
        rows = [row for row in result["variants"] if row["role"] != "local"]
        positions, colors = range(len(rows)), [COLORS[row["role"]] for row in rows]
        axis.barh(positions, [row["comm_ms"]["median"] for row in rows], color=colors, alpha=0.3, label="alone")
        exposed = [row["exposed_ms"] for row in rows]
        spread = [[e["median"] - e["q25"] for e in exposed], [e["q75"] - e["median"] for e in exposed]]
        style = {"elinewidth": 1, "capsize": 2}
        medians = [e["median"] for e in exposed]
        axis.barh(positions, medians, 0.4, xerr=spread, color=colors, error_kw=style, label="exposed (p25..p75)")
        axis.set_yticks(positions, [row["name"] for row in rows])
        finish_panel(axis, f"{result['title']}, {ranks_text(result['world_size'])}", "communication, ms")
    axes[0].invert_yaxis()
    axes[-1].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    return figure
