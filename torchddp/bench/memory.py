"""Worker side of the memory case: the peak resident set of one variant in its own processes."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchddp.bench.cases import Job
from torchddp.bench.timing import MIN_WARMUP_STEPS, Report, build_runners
from torchddp.harness.models import describe_model, make_batch

MEASURED_STEPS = 5


def reset_peak() -> bool:
    """Start the kernel's high-water mark anew; False where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def parse_bytes(text: str, key: str) -> int:
    """The kB line `key` of a /proc/<pid>/status or smaps_rollup text, in bytes. ValueError without one."""
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {key} line in the text")


def parse_peak_bytes(status: str) -> int:
    """VmHWM of a /proc/<pid>/status text, in bytes."""
    return parse_bytes(status, "VmHWM")


def _peak_rss_bytes() -> int:
    try:
        return parse_peak_bytes(Path("/proc/self/status").read_text())
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pay_fixed_costs() -> None:
    """Make this process what any process with a DDP model is."""
    # The first DDP of a process imports a part of torch and starts threads, far more than a small model's gradients.
    # Every variant pays for it, the one without DDP too, so that the difference is what grows with the model.
    tiny = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    tiny(torch.ones(1, 1)).sum().backward()


def measure_memory(job: Job, model_name: str, _report: Report) -> dict[str, Any]:
    """Peak resident bytes over a few steady steps, and the distinct bytes that `.grad` holds after them.

    A launch holds one variant only: which gradients are right is checked by the cases that hold them all.
    """
    pay_fixed_costs()
    (runner,) = build_runners(job, model_name)
    batch = make_batch(model_name, job.seed, dist.get_rank(), 0)
    for _ in range(MIN_WARMUP_STEPS):
        runner.step(batch)
    was_reset = reset_peak()
    for _ in range(MEASURED_STEPS):
        runner.step(batch)
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for _, grad in runner.gradients()}
    mine = {"peak_rss_bytes": _peak_rss_bytes(), "grad_storage_bytes": sum(storages.values())}
    by_rank: list[Any] = [None] * job.world_size
    dist.all_gather_object(by_rank, mine)
    return {
        **describe_model(model_name, runner.module, job.seed),
        "peak_rss_bytes": max(entry["peak_rss_bytes"] for entry in by_rank),
        "grad_storage_bytes": max(entry["grad_storage_bytes"] for entry in by_rank),
        "method": "VmHWM over the measured steps" if was_reset else "peak since the process started",
    }
