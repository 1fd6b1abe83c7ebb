"""Exports a profile in Chrome's trace format (JSON), for Perfetto and chrome://tracing, and as a picture.

In a trace, each rank is a process. Its thread "autograd" shows forward, backward and exposed communication, in which it
waits for buckets. Each bucket has a thread: gathering, packing, queued behind earlier buckets, in flight. The picture
has a panel per rank and a row per thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchddp.harness.plots import panels
from torchddp.harness.tables import bytes_text
from torchddp.profiler.numbers import held_back_by, profile_numbers, spans, step_numbers
from torchddp.profiler.ranks import MergedProfile, MergedStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "forward": "#dee2e6",
    "backward": "#9aa5b1",
    "exposed": "#d9480f",
    "gathering": "#a5d8ff",
    "packing": "#74c0fc",
    "queued": "#ffe066",
    "in flight": "#4c6ef5",
    "waiting": "#f783ac",
}
MAX_PANEL_INCHES = 8.0
# Of the rows of a rank. For Perfetto, a thread numbered 0 or like its process is that process's main thread, and would
# share its row with the thread that really is.
FIRST_THREAD = 1_000_000


def row_names(buckets: Sequence[Mapping[str, Any]]) -> list[str]:
    return ["autograd", *(f"bucket {bucket['bucket']}" for bucket in buckets)]


def chrome_trace(profile: MergedProfile, steps: Sequence[MergedStep]) -> dict[str, Any]:
    """These steps of all ranks as a JSON object. Its `otherData` has the numbers of the median step."""
    zero_ns = min(rank.forward_begin_ns for step in steps for rank in step.steps)
    found, widest = profile_numbers(profile), max(steps, key=lambda step: len(step.buckets))
    events = [event for rank in step_numbers(profile, widest)["ranks"] for event in _metadata(rank)]
    for step in steps:
        begin_us = (min(rank.forward_begin_ns for rank in step.steps) - zero_ns) / 1e3
        for place, rank in enumerate(step_numbers(profile, step)["ranks"]):
            events += _events(rank, step.index, begin_us)
            for param, time_ns in step.steps[place].gradients:
                where = {"pid": rank["rank"], "tid": FIRST_THREAD, "ts": (time_ns - zero_ns) / 1e3}
                events.append({"ph": "i", "s": "t", "name": profile.names[param], "cat": "gradient", **where})
    about = {name: value for name, value in found.items() if name not in ("buckets", "ranks")}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def write_chrome_trace(path: Path, trace: dict[str, Any]) -> None:
    path.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n")


def _metadata(rank: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    def entry(kind: str, row: int, **arguments: object) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank["rank"], "tid": FIRST_THREAD + row, "args": arguments}

    yield entry("process_name", 0, name=f"rank {rank['rank']} ({rank['host']})")
    yield entry("process_sort_index", 0, sort_index=rank["rank"])
    for row, name in enumerate(row_names(rank["buckets"])):
        yield entry("thread_name", row, name=name)
        yield entry("thread_sort_index", row, sort_index=row)


def _events(rank: Mapping[str, Any], step: int, begin_us: float) -> Iterator[dict[str, Any]]:
    for row, what, start_us, end_us in spans(rank):
        arguments: dict[str, Any] = {"step": step}
        if row:
            bucket = rank["buckets"][row - 1]
            size, names = bytes_text(bucket["bytes"]), bucket["parameters"]
            arguments |= {"bucket": row - 1, "size": size, "parameters": names, "held back by": held_back_by(bucket)}
        category = "exposed" if what in ("exposed", "waiting") else "bucket" if row else "compute"
        # It overlaps with "in flight", and it is autograd's thread that waits.
        where = {"pid": rank["rank"], "tid": FIRST_THREAD + (0 if what == "waiting" else row)}
        times = {"ts": begin_us + start_us, "dur": end_us - start_us}
        yield {"ph": "X", "name": what, "cat": category, **where, **times, "args": arguments}


def draw(found: Mapping[str, Any], title: str) -> Figure:
    from matplotlib.patches import Patch

    labels, ranks = row_names(found["buckets"]), found["ranks"]
    height = min(MAX_PANEL_INCHES, 0.7 + 0.22 * len(labels))
    figure, axes = panels(len(ranks), 1, 9.0, 0.8 + height * len(ranks), sharex=True, layout="constrained")
    for axis, rank in zip(axes[:, 0], ranks, strict=True):
        for row, what, start_us, end_us in spans(rank):
            low, high = (0.2, 0.2) if what == "waiting" else (0.0, 0.8)
            axis.barh(row + low, (end_us - start_us) / 1e3, left=start_us / 1e3, height=high, color=COLORS[what])
        axis.axvline(rank["compute_end_us"] / 1e3, color="black", linewidth=0.8, linestyle="--")
        axis.set_ylabel(f"rank {rank['rank']}")
        every = max(1, len(labels) // 40)
        axis.set_yticks(range(0, len(labels), every), labels[::every], fontsize=7)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1][0].set_xlabel("ms since the first rank began forward; the dashed line is the last gradient")
    figure.suptitle(title, fontsize=10)
    handles = [Patch(color=color, label=what) for what, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(COLORS), fontsize=7, frameon=False)
    return figure
