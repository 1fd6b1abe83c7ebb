"""Step time with torchddp's class and torchft's own: two replicas, alternating steps of both, one launch."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.torchft.processes import Child, lighthouse
from examples.train_torchft import batch_of, make_manager, make_network
from torchddp import fault_tolerance

_DEPTH = 8
_WARM_UP = 8  # steps of each class
_LIMIT_S = 300.0
_THEIRS, _OURS = "torchft", "torchddp"


def variants(caps_mb: Sequence[float]) -> dict[str, float | None]:
    """Name -> bucket_cap_mb: torchft's class, ours with default buckets, ours with other bucket sizes."""
    return {_THEIRS: None, _OURS: None, **{f"{_OURS} {cap:g} MiB": cap for cap in caps_mb}}


def measure(steps: int, model_mb: float, caps_mb: Sequence[float], logs: Path) -> dict[str, list[dict[str, float]]]:
    """Variant -> {"step_s", "backward_s"} of the slower replica, for each measured step.

    RuntimeError if a replica fails.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "step_time.log").open("w") as log, lighthouse(log, min_replicas=2) as address:
        command = [sys.executable, "-m", "benchmarks.torchft.step_time", "--steps", str(steps), "--mb", str(model_mb)]
        command += [f"--cap={cap}" for cap in caps_mb]
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
        for name in variants(caps_mb)
    }


def report(times: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and medians of the ratios between neighboring steps."""
    lines = [f"{'class':>18} {'step ms':>8} {'backward ms':>12} {'step / torchft':>15} {'backward':>9}"]
    for name, steps in times.items():
        step, backward = (statistics.median(t[key] for t in steps) * 1e3 for key in ("step_s", "backward_s"))
        ratios = [
            statistics.median(ours[key] / theirs[key] for theirs, ours in zip(times[_THEIRS], steps, strict=True))
            for key in ("step_s", "backward_s")
        ]
        lines.append(f"{name:>18} {step:>8.1f} {backward:>12.1f} {ratios[0]:>15.3f} {ratios[1]:>9.3f}")
    return "\n".join(lines)


def _replica(name: str, steps: int, model_mb: float, caps_mb: Sequence[float]) -> dict[str, list[dict[str, float]]]:
    from torchft import Optimizer
    from torchft.ddp import DistributedDataParallel as Theirs

    torch.set_num_threads(1)
    kinds = variants(caps_mb)
    width = max(16, int((model_mb * 1e6 / 4 / _DEPTH) ** 0.5))
    networks = torch.nn.ModuleList(make_network(width, _DEPTH) for _ in kinds)
    inner = torch.optim.SGD(networks.parameters(), 1e-3)
    manager = make_manager(networks, inner, name, timeout_s=60, min_replicas=2)
    models = [
        Theirs(manager, network)
        if kind == _THEIRS
        else fault_tolerance.DistributedDataParallel(manager, network, bucket_cap_mb=cap)
        for (kind, cap), network in zip(kinds.items(), networks, strict=True)
    ]
    optimizer = Optimizer(manager, inner)
    times: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    names = list(kinds)
    while manager.current_step() < len(names) * (steps + _WARM_UP):
        step = manager.current_step()
        x = batch_of(step, name, width)
        began_s = time.perf_counter()
        optimizer.zero_grad()
        loss = models[step % len(names)](x).square().mean()
        backward_s = time.perf_counter()
        loss.backward()
        done_s = time.perf_counter()
        optimizer.step()
        if manager.current_step() > step >= len(names) * _WARM_UP:
            times[names[step % len(names)]].append(
                {"step_s": time.perf_counter() - began_s, "backward_s": done_s - backward_s}
            )
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--mb", type=float, required=True)
    parser.add_argument("--cap", type=float, action="append", default=[])
    arguments = parser.parse_args()
    print(json.dumps(_replica(arguments.name, arguments.steps, arguments.mb, arguments.cap)), flush=True)
    sys.stdin.read()  # the other replica may still need this one
    os._exit(0)
