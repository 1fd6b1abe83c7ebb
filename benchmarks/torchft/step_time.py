"""What a step costs with torchddp's class and with torchft's own: two replicas, steps of both in turn, one launch."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.torchft.processes import Child, lighthouse
from examples.train_torchft import batch_of, make_manager, make_network
from torchddp import fault_tolerance

_DEPTH = 8
_WARM_UP = 8  # steps of each class
_LIMIT_S = 300.0
CLASSES = ("torchft", "torchddp")


def measure(steps: int, model_mb: float, logs: Path) -> dict[str, list[dict[str, float]]]:
    """Class -> of each measured step, {"step_s", "backward_s"} of the slower replica.

    RuntimeError if a replica fails.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "step_time.log").open("w") as log, lighthouse(log, min_replicas=2) as address:
        command = [sys.executable, "-m", "benchmarks.torchft.step_time", "--steps", str(steps), "--mb", str(model_mb)]
        environment = {"TORCHFT_LIGHTHOUSE": address, "RUST_LOG": "error"}
        children = [Child([*command, "--name", f"replica_{i}"], environment, log) for i in range(2)]
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            replicas = [json.loads(" ".join(child.next_line(deadline_s))) for child in children]
        finally:
            for child in children:
                child.kill()
    return {
        name: [
            {key: max(step[key] for step in both) for key in both[0]}
            for both in zip(*(times[name] for times in replicas), strict=True)
        ]
        for name in CLASSES
    }


def report(times: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and the median of the ratios of neighbouring steps."""
    lines = [f"{'class':>9} {'step ms':>8} {'backward ms':>12}"]
    for name in CLASSES:
        step, backward = (statistics.median(t[key] for t in times[name]) * 1e3 for key in ("step_s", "backward_s"))
        lines.append(f"{name:>9} {step:>8.1f} {backward:>12.1f}")
    for key in ("step_s", "backward_s"):
        ratios = [b[key] / a[key] for a, b in zip(times["torchft"], times["torchddp"], strict=True)]
        lines.append(f"torchddp / torchft, {key.removesuffix('_s')}: {statistics.median(ratios):.3f} (paired median)")
    return "\n".join(lines)


def _replica(name: str, steps: int, model_mb: float) -> dict[str, list[dict[str, float]]]:
    from torchft import Optimizer
    from torchft.ddp import DistributedDataParallel as Theirs

    torch.set_num_threads(1)
    width = max(16, int((model_mb * 1e6 / 4 / _DEPTH) ** 0.5))
    networks = torch.nn.ModuleList(make_network(width, _DEPTH) for _ in CLASSES)
    inner = torch.optim.SGD(networks.parameters(), 1e-3)
    manager = make_manager(networks, inner, name, timeout_s=60, min_replicas=2)
    wrap: dict[str, Any] = {"torchft": Theirs, "torchddp": fault_tolerance.DistributedDataParallel}
    models = [wrap[c](manager, network) for c, network in zip(CLASSES, networks, strict=True)]
    optimizer = Optimizer(manager, inner)
    times: dict[str, list[dict[str, float]]] = {c: [] for c in CLASSES}
    while manager.current_step() < 2 * (steps + _WARM_UP):
        step = manager.current_step()
        x = batch_of(step, name, width)
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss = models[step % 2](x).square().mean()
        backward_s = time.perf_counter()
        loss.backward()
        done_s = time.perf_counter()
        optimizer.step()
        if manager.current_step() > step >= 2 * _WARM_UP:
            times[CLASSES[step % 2]].append(
                {"step_s": time.perf_counter() - began_s, "backward_s": done_s - backward_s}
            )
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--mb", type=float, required=True)
    arguments = parser.parse_args()
    print(json.dumps(_replica(arguments.name, arguments.steps, arguments.mb)), flush=True)
    sys.stdin.read()  # the other may still need this one
    os._exit(0)
