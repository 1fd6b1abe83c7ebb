"""What each rank of a launch runs."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.cases import GpuJob
from torchddp.bench.cases import Job
from torchddp.bench.worker import Reporter, run_rank


def measure(job: Job, rank: int, channel: Connection) -> list[dict[str, Any]]:
    """The machine, then the results of every part, each under its kind."""
    from benchmarks.gpu.machine import describe_gpu
    from benchmarks.gpu.measure import pick_device, time_model
    from benchmarks.gpu.pack import time_size

    assert isinstance(job, GpuJob)
    device = pick_device(job, rank)
    results: list[dict[str, Any]] = [{"kind": "gpu", "gpu": describe_gpu(device)}]
    if "models" in job.parts:
        for model in job.models:
            report = Reporter(channel, model, enabled=rank == 0)
            results.append({"kind": "model", **time_model(job, model, rank, device, report)})
    if "pack" in job.parts and rank == 0:  # others on the same device would take part of its bandwidth
        for size_bytes in job.pack_bytes:
            report = Reporter(channel, f"pack {size_bytes >> 20} MiB", enabled=True)
            seconds = job.seconds / len(job.pack_bytes)
            results.append({"kind": "pack", **time_size(job, size_bytes, seconds, device, report)})
    return results


def run_gpu_rank(rank: int, job: GpuJob, store_path: str, channel: Connection) -> None:
    """Entry point of a worker process."""
    run_rank(rank, job, store_path, channel, measure)
