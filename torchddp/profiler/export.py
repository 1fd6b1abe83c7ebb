"""Exports steps in Chrome's trace format (JSON), for Perfetto and chrome://tracing, and as a picture.

In a trace, each rank is a process. Its thread "autograd" shows forward, backward and exposed communication. Each bucket
has a thread: gathering (first to last gradient), packing, queued behind earlier buckets, in flight. The picture has a
panel per rank and a row per thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchddp.harness.plots import panels
from torchddp.profiler.ranks import MergedStep
from torchddp.profiler.steps import BucketTimes, Step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AUTOGRAD = 0  # its thread and row; bucket i has 1 + i
COLORS = {
    "forward": "#dee2e6",
    "backward": "#9aa5b1",
    "exposed": "#d9480f",
    "gathering": "#a5d8ff",
    "queued": "#ffe066",
    "in flight": "#4c6ef5",
}
MAX_PANEL_INCHES = 8.0


def row_names(buckets: int) -> list[str]:
    return ["autograd", *(f"bucket {index}" for index in range(buckets))]


def spans(step: Step) -> list[tuple[int, str, int, int]]:
    """(row, what, start in ns, end in ns) of a step's spans, without those that lack an end or have no length."""
    found: list[tuple[int, str, int | None, int | None]] = [
        (AUTOGRAD, "forward", step.forward_begin_ns, step.backward_begin_ns),
        (AUTOGRAD, "backward", step.backward_begin_ns, step.compute_end_ns),
        (AUTOGRAD, "exposed", step.compute_end_ns, step.backward_end_ns),
    ]
    for bucket in step.buckets:
        row = 1 + bucket.index
        found += [
            (AUTOGRAD, f"wait for bucket {bucket.index}", bucket.wait_begin_ns, bucket.done_ns),
            (row, "gathering", bucket.first_ready_ns, bucket.last_ready_ns),
            (row, "packing", bucket.last_ready_ns, bucket.packed_ns),
            (row, "queued", bucket.packed_ns, bucket.launched_ns),
            (row, "in flight", bucket.launched_ns, bucket.done_ns),
        ]
    return [
        (row, what, begin_ns, end_ns)
        for row, what, begin_ns, end_ns in found
        if begin_ns is not None and end_ns is not None and end_ns > begin_ns
    ]


# --- Chrome's trace format ---


def chrome_trace(
    ranks: Sequence[tuple[int, str, Sequence[Step]]], names: Sequence[str], about: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The trace as a JSON object, starting with the earliest step.

    ``ranks``: (rank, label, steps) of each, on one clock. ``names``: of the parameters. ``about``: its `otherData`.
    """
    zero_ns = min((step.forward_begin_ns for _, _, steps in ranks for step in steps), default=0)
    events: list[dict[str, Any]] = []
    for rank, label, steps in ranks:
        events += _metadata(rank, label, max((len(step.buckets) for step in steps), default=0))
        events += [event for step in steps for event in _events(rank, step, names, zero_ns)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about or {}}


def write_chrome_trace(path: Path, trace: dict[str, Any]) -> None:
    path.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n")


def _metadata(rank: int, label: str, buckets: int) -> Iterable[dict[str, Any]]:
    def entry(kind: str, thread: int, **arguments: object) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}

    yield entry("process_name", AUTOGRAD, name=label)
    yield entry("process_sort_index", AUTOGRAD, sort_index=rank)
    for thread, name in enumerate(row_names(buckets)):
        yield entry("thread_name", thread, name=name)
        yield entry("thread_sort_index", thread, sort_index=thread)


def _events(rank: int, step: Step, names: Sequence[str], zero_ns: int) -> Iterable[dict[str, Any]]:
    """A step's events. Times are in us since the start of the trace."""
    for thread, what, begin_ns, end_ns in spans(step):
        category, arguments = _about(thread, what, step, names)
        times = {"ts": (begin_ns - zero_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        yield {"ph": "X", "name": what, "cat": category, "pid": rank, "tid": thread, **times, "args": arguments}
    for param, time_ns in step.gradients:
        where = {"pid": rank, "tid": AUTOGRAD, "ts": (time_ns - zero_ns) / 1e3}
        yield {"ph": "i", "s": "t", "name": names[param], "cat": "gradient", **where}


def _about(thread: int, what: str, step: Step, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    if what.startswith("wait"):
        return "exposed", {}
    if thread == AUTOGRAD:
        return "exposed" if what == "exposed" else "compute", {"step": step.index}
    bucket = {} if what in ("packing", "queued") else _bucket_dict(step.buckets[thread - 1], names)
    return "bucket", {"step": step.index, **bucket}


def _bucket_dict(bucket: BucketTimes, names: Sequence[str]) -> dict[str, Any]:
    about: dict[str, Any] = {
        "bytes": bucket.nbytes,
        "parameters": [names[param] for param in bucket.params],
        "held back by": "" if bucket.holder is None else names[bucket.holder],
    }
    return about if bucket.behind is None else {**about, "queued behind bucket": bucket.behind}


# --- a picture ---


def draw(step: MergedStep, ranks: Sequence[int], title: str) -> Figure:
    """The figure; the caller closes it."""
    from matplotlib.patches import Patch

    zero_ns = min(rank.forward_begin_ns for rank in step.steps)
    labels = row_names(max(len(rank.buckets) for rank in step.steps))
    height = min(MAX_PANEL_INCHES, 0.7 + 0.22 * len(labels))
    figure, axes = panels(len(ranks), 1, 9.0, 0.8 + height * len(ranks), sharex=True, layout="constrained")
    for axis, rank, rank_step in zip(axes[:, 0], ranks, step.steps, strict=True):
        for row, what, begin_ns, end_ns in spans(rank_step):
            kind = "gathering" if what == "packing" else what
            if kind in COLORS:  # leaves out waits, which are part of the exposed time
                left_ms, length_ms = (begin_ns - zero_ns) / 1e6, (end_ns - begin_ns) / 1e6
                axis.barh(row, length_ms, left=left_ms, height=0.8, color=COLORS[kind])
        axis.axvline((rank_step.compute_end_ns - zero_ns) / 1e6, color="black", linewidth=0.8, linestyle="--")
        axis.set_ylabel(f"rank {rank}")
        every = max(1, len(labels) // 40)
        axis.set_yticks(range(0, len(labels), every), labels[::every], fontsize=7)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1][0].set_xlabel("ms since the start of forward; the dashed line is the last gradient")
    figure.suptitle(title, fontsize=10)
    handles = [Patch(color=color, label=what) for what, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(COLORS), fontsize=7, frameon=False)
    return figure
