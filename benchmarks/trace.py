"""Device activity during a call, from torch's profiler: kernels, copies and fills, each with its stream and times.

They are read from the exported Chrome trace, whose fields are the same in every torch version that we support.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
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
