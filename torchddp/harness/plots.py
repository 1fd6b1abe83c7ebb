"""Shared by all plots: drawing without a window, colors, and labels."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"torch": "#9aa5b1", "ours": "#d9480f", "peer": "#4c6ef5", "local": "#dee2e6"}


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure, `width` by `height` inches, and its axes as [row][column]. `options`: for `pyplot.subplots`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, **{"layout": "tight"} | options)


def finish_panel(axis: Axes, title: str, xlabel: str, ylabel: str | None = None) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(xlabel)
    if ylabel is not None:
        axis.set_ylabel(ylabel)
        axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def figure_png(figure: Figure, dpi: int = 120) -> bytes:
    """The figure as a PNG; closes the figure."""
    from matplotlib import pyplot

    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi)
    pyplot.close(figure)
    return stream.getvalue()
