"""Plots the moved data against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.host_model.report import bytes_text, nodes_text

_COLORS = {"flat": "#9aa5b1", "grouped": "#4c6ef5"}


def save_model(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per size: cache lines of small all-reduces, bytes of large ones; in total and between nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({row["message_bytes"] for row in results})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(3.6 * len(sizes), 3.4), squeeze=False)
    for axis, nbytes in zip(axes.flat, sizes, strict=True):
        of_size = [row for row in results if row["message_bytes"] == nbytes]
        is_small = all(row["lines_in_a_row"] is not None for row in of_size)
        all_of_it, across = ("lines", "far_lines") if is_small else ("bytes", "far_bytes")
        for nodes, scheme in sorted({(row["nodes"], row["scheme"]) for row in of_size}):
            rows = [row for row in of_size if (row["nodes"], row["scheme"]) == (nodes, scheme)]
            # The total is nearly the same for any number of nodes.
            key, label = (all_of_it, "in all") if nodes == 1 else (across, f"across, {nodes_text(nodes)}")
            axis.plot(
                [row["ranks"] for row in rows],
                [row[key] for row in rows],
                "-" if nodes == 1 else "--",
                marker=".",
                color=_COLORS[scheme],
                label=f"{scheme}, {label}",
            )
        ranks = sorted({row["ranks"] for row in of_size})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ranks, [str(count) for count in ranks])
        axis.set_title(f"{bytes_text(nbytes)}: {'cache lines' if is_small else 'bytes'}", fontsize=9)
        axis.set_xlabel("ranks")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
