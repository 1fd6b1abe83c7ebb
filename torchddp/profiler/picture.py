"""A step as a picture: what autograd did and where each bucket was, one panel a rank. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchddp.profiler.merge import MergedStep
from torchddp.profiler.steps import Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "forward": "#dee2e6",
    "backward": "#9aa5b1",
    "exposed": "#d9480f",
    "gathering": "#a5d8ff",
    "queued": "#ffe066",
    "in flight": "#4c6ef5",
}
MAX_PANEL_INCHES = 8.0

# (row, what, begin in ms, length in ms)
Bar = tuple[int, str, float, float]


def bars(step: Step, zero_ns: int) -> list[Bar]:
    """The bars of one rank: row 0 is autograd, row 1 + i bucket i. Without those that have no length."""
    spans: list[tuple[int, str, int | None, int | None]] = [
        (0, "forward", step.forward_begin_ns, step.backward_begin_ns),
        (0, "backward", step.backward_begin_ns, step.compute_end_ns),
        (0, "exposed", step.compute_end_ns, step.backward_end_ns),
    ]
    for bucket in step.buckets:
        row = 1 + bucket.index
        spans += [
            (row, "gathering", bucket.first_ready_ns, bucket.packed_ns),
            (row, "queued", bucket.packed_ns, bucket.launched_ns),
            (row, "in flight", bucket.launched_ns, bucket.done_ns),
        ]
    return [
        (row, what, (begin - zero_ns) / 1e6, (end - begin) / 1e6)
        for row, what, begin, end in spans
        if begin is not None and end is not None and end > begin
    ]


def draw(step: MergedStep, ranks: Sequence[int], title: str) -> Figure:
    """The figure; whoever gets it closes it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    zero_ns = min(rank.forward_begin_ns for rank in step.steps)
    rows = 1 + max(len(rank.buckets) for rank in step.steps)
    height = min(MAX_PANEL_INCHES, 0.7 + 0.22 * rows)
    figure, axes = pyplot.subplots(
        len(ranks), 1, figsize=(9.0, 0.8 + height * len(ranks)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, rank, rank_step in zip(axes[:, 0], ranks, step.steps, strict=True):
        for row, what, begin_ms, length_ms in bars(rank_step, zero_ns):
            axis.barh(row, length_ms, left=begin_ms, height=0.8, color=COLORS[what])
        axis.axvline((rank_step.compute_end_ns - zero_ns) / 1e6, color="black", linewidth=0.8, linestyle="--")
        axis.set_ylabel(f"rank {rank}")
        labels = ["autograd", *(f"bucket {index}" for index in range(rows - 1))]
        every = max(1, rows // 40)
        axis.set_yticks(range(0, rows, every), labels[::every], fontsize=7)
        axis.set_ylim(rows - 0.5, -0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1][0].set_xlabel("ms from the begin of forward; the dashed line is the last gradient")
    figure.suptitle(title, fontsize=10)
    handles = [Patch(color=color, label=what) for what, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(COLORS), fontsize=7, frameon=False)
    return figure
