"""Plots step time against bucket size, for each place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.links.field import PLANNED, TORCH_DEFAULT


def save_links(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per place and model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.6 * columns, 3.0 * rows), squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, results, strict=False):
        medians = {row["name"]: row["step_ms"]["median"] for row in result["variants"]}
        prefix = "torchddp, cap "
        caps = [float(name.removeprefix(prefix)) for name in medians if name.startswith(prefix)]
        swept = [median for name, median in medians.items() if name.startswith(prefix)]
        axis.plot(caps, swept, marker="o", markersize=3, color="#4c6ef5", label="torchddp, by bucket_cap_mb")
        axis.axhline(medians[PLANNED], color="#d9480f", label="torchddp, planned")
        axis.axhline(medians[TORCH_DEFAULT], color="#9aa5b1", linestyle="--", label="torch default")
        axis.axhline(medians["no DDP"], color="#2b8a3e", linewidth=1, label="no DDP")
        axis.set_xscale("log")
        axis.set_xticks(caps, [f"{cap:g}" for cap in caps], fontsize=7)
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(f"{result['place']}, {result['model']}", fontsize=9)
        axis.set_xlabel("MiB")
        axis.set_ylabel("step, ms")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
