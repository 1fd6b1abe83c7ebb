"""The picture of pack bandwidth: a group of bars per bucket size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = ("#495057", "#9aa5b1", "#d9480f", "#f08c00", "#4c6ef5")


def save_bandwidth(results: Sequence[dict[str, Any]], path: Path) -> None:
    """GB/s of every implementation, p25..p75 as the spread."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [row["name"] for row in results[0]["implementations"]]
    width = 0.8 / len(names)
    figure, axis = pyplot.subplots(figsize=(8.0, 3.6))
    for index, name in enumerate(names):
        speeds = [result["implementations"][index]["gb_per_s"] for result in results]
        axis.bar(
            [place + index * width for place in range(len(results))],
            [speed["median"] for speed in speeds],
            width,
            yerr=[[s["median"] - s["q25"] for s in speeds], [s["q75"] - s["median"] for s in speeds]],
            color=COLORS[index],
            label=name,
        )
    middle = width * (len(names) - 1) / 2
    axis.set_xticks([place + middle for place in range(len(results))], [f"{r['bytes'] / 1e6:.0f} MB" for r in results])
    axis.set_ylabel("GB/s, read and written")
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
