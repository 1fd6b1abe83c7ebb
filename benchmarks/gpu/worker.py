"""The worker of each rank of a launch."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu.cases import HOST_CASE, MEMORY_CASE, PACK_CASE, SCALE_CASE, GpuJob
from torchddp.bench.cases import Job
from torchddp.harness.launch import Reporter


def measure(job: Job, rank: int, channel: Connection) -> list[dict[str, Any]]:
    """Collective: a description of the machine, then the results of the case, each with its kind."""
    from benchmarks.gpu.host import time_host
    from benchmarks.gpu.machine import describe_gpu
    from benchmarks.gpu.measure import pick_device, time_model
    from benchmarks.gpu.memory import measure_memory
    from benchmarks.gpu.pack import time_pack
    from benchmarks.gpu.scale import time_scale

    assert isinstance(job, GpuJob)
    device = pick_device(job, rank)
    machine: dict[str, Any] = {"kind": "gpu", "gpu": describe_gpu(device)}
    report = Reporter(channel, ", ".join(job.models) or job.case, enabled=rank == 0)
    if job.case == MEMORY_CASE:
        return [machine, *measure_memory(job, rank, device, report)]
    rows = {PACK_CASE: time_pack, SCALE_CASE: time_scale, HOST_CASE: time_host}
    if job.case in rows:
        return [machine, *rows[job.case](job, device, report)]
    return [machine, *({"kind": "model", **time_model(job, name, rank, device, report)} for name in job.models)]
