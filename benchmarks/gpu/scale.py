"""Compares a gradient that NCCL scales (PreMulSum) and reduces in place with one that is packed and scaled first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.cases import KIB, MIB, SCALE_CASE, GpuJob
from benchmarks.gpu.duel import device_us, duel, for_each_size, timed_what
from benchmarks.gpu.given import GivenStep
from benchmarks.gpu.pack import is_pack, random_gradients
from benchmarks.gpu.trace import DeviceEvent, is_collective
from torchddp.harness.launch import Report

BYTES = (256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_BYTES = (256 * KIB,)
SCALE_DIVISOR = 2


def counts(event: DeviceEvent) -> bool:
    """The work of reducing a gradient; not the copy that made the gradient."""
    return is_pack(event) or is_collective(event)


def time_scale(job: GpuJob, device: torch.device, report: Report) -> list[dict[str, Any]]:
    """One table per gradient size."""
    sizes = QUICK_BYTES if job.quick else BYTES
    return for_each_size(sizes, report, lambda size: _time_size(job, size, device))


def _time_size(job: GpuJob, size: int, device: torch.device) -> dict[str, Any]:
    (gradient,) = random_gradients([size // 4], device, job.seed)
    divisor = SCALE_DIVISOR * job.world_size

    def of_a_step(*, adopts: bool) -> np.ndarray:
        step = GivenStep([gradient], divisor=divisor, adopts=adopts)
        step.check(job.world_size)
        return device_us(step, device, counts)

    times_us = {"packed with the scale, then reduced": of_a_step(adopts=False)}
    over_nccl = dist.get_backend() == "nccl"
    if over_nccl or device.type == "cpu":
        times_us["torchddp, large gradients adopted"] = of_a_step(adopts=True)
    note = "Only NCCL has PreMulSum."
    if over_nccl:
        note = ""
        operation = dist._make_nccl_premul_sum(1 / divisor)
        # The values soon become 0, which takes just as long.
        times_us["PreMulSum, in place"] = device_us(lambda: dist.all_reduce(gradient, op=operation), device, counts)
    title = f"one gradient of {size / MIB:g} MiB, times 1/{divisor}, {timed_what(device)}"
    return duel(SCALE_CASE, title, times_us, note=note)
