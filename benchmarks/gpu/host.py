"""Host time of a collective, through our transport and through torch's process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.cases import HOST_CASE, KIB, GpuJob
from benchmarks.gpu.duel import duel, host_us
from torchddp import DistributedDataParallel
from torchddp.harness.launch import Report

BYTES = 64 * KIB
CALLS = 50


def time_host(job: GpuJob, device: torch.device, report: Report) -> list[dict[str, Any]]:
    """One table: an all-reduce, started and awaited on the current stream."""
    report(0, 1)
    # The transport that a model on this device gets.
    model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
    transport = model.reducer.transport
    ours = transport.allocate(BYTES // 4, torch.zeros(1, device=device)).zero_()
    theirs = torch.zeros(BYTES // 4, device=device)
    handle = transport.make_work()

    def by_torchddp() -> None:
        transport.all_reduce(ours, handle)
        handle.wait()

    def by_torch() -> None:
        work = dist.all_reduce(theirs, async_op=True)
        assert work is not None
        work.wait()

    works = {"torch.distributed.all_reduce": by_torch, f"torchddp over {transport.name}": by_torchddp}
    times_us = host_us(list(works.values()), device, job.seconds, job.seed, CALLS)
    title = f"all-reduce of {BYTES // KIB} KiB, time of the host"
    return [duel(HOST_CASE, title, dict(zip(works, times_us, strict=True)))]
