"""Times the end of a program: loading data in forked processes, leaving the process group, ending the process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchddp.harness.launch import LaunchError
from torchddp.harness.variants import TORCH_DDP, TORCHDDP

CHECKOUT = Path(__file__).resolve().parents[2]
CLASSES = {"torch": TORCH_DDP, "torchddp": TORCHDDP}
# For a program that takes seconds. One that hangs is killed and counts as an error.
LIMIT_S = 60.0
MAX_ROUNDS = 5
WHAT = ("loading_ms", "leaving_ms", "ending_ms")


def time_leaving(device: str, backend: str, seconds: float, update: Callable[[float, float], None]) -> dict[str, Any]:
    """[class][what][round] in ms, one program per round. LaunchError if one fails or does not end."""
    times_ms: dict[str, dict[str, list[float]]] = {name: {what: [] for what in WHAT} for name in CLASSES}
    start_s = time.monotonic()
    for round_ in range(MAX_ROUNDS):
        for name, class_path in CLASSES.items():
            for what, ms in _run(name, class_path, device, backend).items():
                times_ms[name][what].append(ms)
        elapsed_s = time.monotonic() - start_s
        update(elapsed_s, max(seconds, elapsed_s))
        if elapsed_s * (round_ + 2) / (round_ + 1) > seconds:  # another round would be too long
            break
    return {"kind": "leave", "times_ms": times_ms}


def _run(name: str, class_path: str, device: str, backend: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.gpu.leaver", class_path, device, backend]
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        said = "had trained, loaded and left the group" if error.stdout else "had not left the group"
        raise LaunchError(f"a program using {name}'s class did not end within {LIMIT_S:g} s: it {said}") from error
    ended_s = time.monotonic()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(f"a program using {name}'s class ended with exit code {done.returncode}: {last}")
    said = json.loads(done.stdout.splitlines()[-1])
    return {**{what: said[what] for what in WHAT[:2]}, "ending_ms": (ended_s - said["ended_s"]) * 1000}
