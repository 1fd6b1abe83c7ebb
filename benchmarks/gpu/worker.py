"""What each rank of a launch runs."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.cases import GpuJob
from torchddp.bench.cases import Job
from torchddp.harness.launch import Reporter


def measure(job: Job, rank: int, channel: Connection) -> list[dict[str, Any]]:
    """The machine, then the result of every model, each under its kind."""
    from benchmarks.gpu.machine import describe_gpu
    from benchmarks.gpu.measure import pick_device, time_model

    assert isinstance(job, GpuJob)
    device = pick_device(job, rank)
    results: list[dict[str, Any]] = [{"kind": "gpu", "gpu": describe_gpu(device)}]
    for model in job.models:
        report = Reporter(channel, model, enabled=rank == 0)
        results.append({"kind": "model", **time_model(job, model, rank, device, report)})
    return results
