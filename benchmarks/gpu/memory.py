"""Memory of a training step, by the driver's count and by torch's allocator. One variant per process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import GpuJob
from benchmarks.gpu.measure import build_runners
from benchmarks.gpu.models import MODELS, make_batch
from torchddp.bench.memory import MEASURED_STEPS, parse_bytes
from torchddp.bench.timing import MIN_WARMUP_STEPS
from torchddp.harness.launch import Report


def measure_memory(job: GpuJob, rank: int, device: torch.device, report: Report) -> list[dict[str, Any]]:
    """Bytes after some steps. The driver counts the whole device, so no other program may use it."""
    (name,) = job.models
    (runner,) = build_runners(job, name, device)
    batch = make_batch(job, name, rank, 0).to(device)
    for _ in range(MIN_WARMUP_STEPS):
        runner.step(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(MEASURED_STEPS):
        runner.step(batch)
    about = {"kind": "memory", "model": name, "title": MODELS[name].title, "variant": runner.variant.name}
    return [{**about, "bytes": _bytes_of(device)}]


def _bytes_of(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {"resident": parse_bytes(Path("/proc/self/status").read_text(), "VmRSS")}
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "driver": total - free,
        "torch reserved": torch.cuda.max_memory_reserved(device),
        "torch peak": torch.cuda.max_memory_allocated(device),
    }
