"""Device activity during a call, from torch's profiler: kernels, copies and fills, each with its stream and times.

They are read from the exported Chrome trace, whose fields are the same in every torch version that we support.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}


@dataclass(frozen=True)
class DeviceEvent:
    """One piece of work on the device."""

    kind: str  # kernel, copy or fill
    name: str
    stream: int
    start_us: float
    end_us: float


def parse_trace(trace: dict[str, Any]) -> list[DeviceEvent]:
    """The device events of a Chrome trace, by start time."""
    events = [
        DeviceEvent(
            kind=KINDS[entry["cat"]],
            name=entry["name"],
            stream=int(entry["args"]["stream"]),
            start_us=float(entry["ts"]),
            end_us=float(entry["ts"]) + float(entry["dur"]),
        )
        for entry in trace["traceEvents"]
        if entry.get("ph") == "X" and entry.get("cat") in KINDS
    ]
    return sorted(events, key=lambda event: event.start_us)


def record(work: Callable[[], object]) -> list[DeviceEvent]:
    """Runs `work`, waits for it and returns the device events. Empty without a device."""
    with_device = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA if with_device else ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory(prefix="torchddp-trace-") as folder:
        if with_device:
            torch.cuda.synchronize()
        with profile(activities=activities) as profiler:
            work()
            if with_device:
                torch.cuda.synchronize()
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return parse_trace(json.loads(path.read_text()))


@dataclass(frozen=True)
class Counts:
    """The amount of work of each kind that a step gives to the device."""

    kernels: float
    copies: float
    fills: float


def count(events: Iterable[DeviceEvent], steps: int) -> Counts:
    """Counts events per step."""
    kinds = [event.kind for event in events]
    kernels, copies, fills = (kinds.count(kind) / steps for kind in KINDS.values())
    return Counts(kernels, copies, fills)


def is_collective(event: DeviceEvent) -> bool:
    """Whether this is an NCCL kernel, including the one for single-rank groups."""
    return event.kind == "kernel" and any(part in event.name for part in ("nccl", "NCCL", "oneRankReduce"))


def is_computation(event: DeviceEvent) -> bool:
    """Whether this is one of the model's kernels: neither NCCL's nor one of our packing kernels."""
    return event.kind == "kernel" and not is_collective(event) and "torchddp" not in event.name


@dataclass(frozen=True)
class Overlap:
    """How the collectives of a step overlap with its computation."""

    collectives: int
    # On streams without computation.
    on_their_own_stream: int
    # Started before the last computation kernel ended.
    begun_before_the_end: int
    overlapped_us: float
    total_us: float


def _covered_us(event: DeviceEvent, others: Sequence[DeviceEvent]) -> float:
    """The part of this event during which any of the others, ordered by start, was running."""
    covered, reached = 0.0, event.start_us
    for other in others:
        begin, end = max(other.start_us, reached), min(other.end_us, event.end_us)
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def overlap(events: Sequence[DeviceEvent]) -> Overlap:
    """The overlap of the collectives with the computation among these events."""
    collectives = [event for event in events if is_collective(event)]
    computation = [event for event in events if is_computation(event)]
    last_end_us = max((event.end_us for event in computation), default=float("-inf"))
    streams = {event.stream for event in computation}
    return Overlap(
        collectives=len(collectives),
        on_their_own_stream=sum(event.stream not in streams for event in collectives),
        begun_before_the_end=sum(event.start_us < last_end_us for event in collectives),
        overlapped_us=sum(_covered_us(event, computation) for event in collectives),
        total_us=sum(event.end_us - event.start_us for event in collectives),
    )
