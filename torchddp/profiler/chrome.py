"""Steps in Chrome's trace format (JSON), which Perfetto and chrome://tracing show.

A process is a rank. Its thread "autograd" has forward, backward and what was exposed of communication, each bucket a
thread of its own: gathering (first to last gradient), packing, queued behind earlier buckets, in flight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchddp.profiler.steps import BucketTimes, Step

AUTOGRAD_THREAD = 0


def chrome_trace(
    ranks: Sequence[tuple[int, str, Sequence[Step]]], names: Sequence[str], about: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The trace as a JSON object.

    Args:
        ranks: (rank, label, steps) of each, all on one clock. Times of the trace count from the earliest.
        names: of the parameters, by index.
        about: kept in the trace as `otherData`.
    """
    zero_ns = min((step.forward_begin_ns for _, _, steps in ranks for step in steps), default=0)
    events: list[dict[str, Any]] = []
    for rank, label, steps in ranks:
        events += _metadata(rank, label, max((len(step.buckets) for step in steps), default=0))
        for step in steps:
            events += _autograd(rank, step, names, zero_ns)
            for bucket in step.buckets:
                events += _bucket(rank, step, bucket, names, zero_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about or {}}


def write_chrome_trace(path: Path, trace: dict[str, Any]) -> None:
    """Write what `chrome_trace` gave."""
    path.write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")) + "\n")


def _metadata(rank: int, label: str, buckets: int) -> Iterable[dict[str, Any]]:
    def entry(kind: str, thread: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}

    yield entry("process_name", AUTOGRAD_THREAD, name=label)
    yield entry("process_sort_index", AUTOGRAD_THREAD, sort_index=rank)
    threads = ["autograd", *(f"bucket {index}" for index in range(buckets))]
    for thread, name in enumerate(threads):
        yield entry("thread_name", thread, name=name)
        yield entry("thread_sort_index", thread, sort_index=thread)


class _Track:
    """Writes events of one thread, with times in us from the trace's zero."""

    def __init__(self, rank: int, thread: int, zero_ns: int) -> None:
        self._where = {"pid": rank, "tid": thread}
        self._zero_ns = zero_ns
        self.events: list[dict[str, Any]] = []

    def span(self, name: str, category: str, begin_ns: int | None, end_ns: int | None, **arguments: Any) -> None:
        """A complete event, unless an end is missing or nothing lies between."""
        if begin_ns is not None and end_ns is not None and end_ns > begin_ns:
            times = {"ts": (begin_ns - self._zero_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
            self.events.append({"ph": "X", "name": name, "cat": category, **self._where, **times, "args": arguments})

    def instant(self, name: str, category: str, time_ns: int) -> None:
        """An event without duration."""
        ts = (time_ns - self._zero_ns) / 1e3
        self.events.append({"ph": "i", "s": "t", "name": name, "cat": category, **self._where, "ts": ts})


def _autograd(rank: int, step: Step, names: Sequence[str], zero_ns: int) -> list[dict[str, Any]]:
    track = _Track(rank, AUTOGRAD_THREAD, zero_ns)
    track.span("forward", "compute", step.forward_begin_ns, step.backward_begin_ns, step=step.index)
    track.span("backward", "compute", step.backward_begin_ns, step.compute_end_ns, step=step.index)
    for param, time_ns in step.gradients:
        track.instant(names[param], "gradient", time_ns)
    track.span("exposed", "exposed", step.compute_end_ns, step.backward_end_ns, step=step.index)
    for bucket in step.buckets:
        track.span(f"wait for bucket {bucket.index}", "exposed", bucket.wait_begin_ns, bucket.done_ns)
    return track.events


def _bucket(rank: int, step: Step, bucket: BucketTimes, names: Sequence[str], zero_ns: int) -> list[dict[str, Any]]:
    track = _Track(rank, 1 + bucket.index, zero_ns)
    about: dict[str, Any] = {
        "step": step.index,
        "bytes": bucket.nbytes,
        "parameters": [names[param] for param in bucket.params],
        "held back by": "" if bucket.holder is None else names[bucket.holder],
    }
    if bucket.behind is not None:
        about["queued behind bucket"] = bucket.behind
    track.span("gathering", "bucket", bucket.first_ready_ns, bucket.last_ready_ns, **about)
    track.span("packing", "bucket", bucket.last_ready_ns, bucket.packed_ns, step=step.index)
    track.span("queued", "bucket", bucket.packed_ns, bucket.launched_ns, step=step.index)
    track.span("in flight", "bucket", bucket.launched_ns, bucket.done_ns, **about)
    return track.events
