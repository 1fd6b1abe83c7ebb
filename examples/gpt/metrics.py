"""The metrics of a run, and the file they are written to."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from examples.gpt.errors import ExampleError

WARMUP_STEPS_NOT_TIMED = 3  # first steps of a process: lazy initialization, bucket rebuild


def peak_rss_bytes() -> int:
    """High-water mark of this process's resident memory.

    Linux carries `ru_maxrss` over from the parent through fork and exec, so a small child of a large launcher
    would report the launcher's peak; VmHWM belongs to this process's own memory.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def versions() -> dict[str, str | None]:
    """The software versions used for the measurements."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchddp": _package_version("torchddp"),
        "platform": platform.platform(),
        "cpu_count": str(os.cpu_count()),
    }


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of the values lie, interpolated linearly; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize a run, or the segments of one run in order.

    Step times exclude each process's first steps, and the probed ones, which contain barriers.
    """
    later = [step for run in runs for step in run["steps"][WARMUP_STEPS_NOT_TIMED:]]
    step_ms = [step["step_ms"] for step in later if not step["probed"]]
    exposed_ms = [probe["exposed_ms"] for run in runs for probe in run["communication"]]
    losses = [step["loss"] for run in runs for step in run["steps"]]
    validation = [entry["loss"] for run in runs for entry in run["validation"]]
    return {
        "final_train_loss": losses[-1] if losses else None,
        "final_validation_loss": validation[-1] if validation else None,
        "step_ms_p50": percentile(step_ms, 50),
        "step_ms_p90": percentile(step_ms, 90),
        "exposed_communication_ms_p50": statistics.median(exposed_ms) if exposed_ms else None,
        "communication_probes": len(exposed_ms),
        "peak_rss_bytes": max(run["memory"]["training_peak_rss_bytes"] for run in runs),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` atomically: a reader never sees half a file."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=True) + "\n")
        os.replace(unfinished, path)
    except OSError as error:
        raise ExampleError(f"cannot write {path}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def prepare_output(path: Path | None, option: str) -> None:
    """Create the folder of a file that a run writes at its end, so that a bad path fails at the start."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExampleError(f"{option} {path}: cannot create its folder: {error.strerror}") from error
    if path.is_dir():
        raise ExampleError(f"{option} {path} is a folder: name a file")
    if not os.access(path.parent, os.W_OK):
        raise ExampleError(f"{option} {path}: its folder is not writable")
