"""Speed of packing a bucket, compared with a plain copy of as many bytes on the same device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.cases import MIB, PACK_CASE, PACK_GOAL, GpuJob
from benchmarks.gpu.duel import device_us, duel, for_each_size, timed_what
from benchmarks.gpu.given import GivenStep
from benchmarks.gpu.trace import DeviceEvent
from torchddp.ddp import model
from torchddp.harness.launch import Report

# Typical gradient sizes: a few large, many small, each a multiple of 128 bytes.
NUMELS = (768, 768, 147456, 384, 64, 36864, 192, 32, 589824)
# More than the last-level cache of a Hopper chip, so that memory bandwidth is measured.
BYTES, QUICK_BYTES = (64 * MIB, 256 * MIB), (1 * MIB,)


def numels_of(total: int, extra: int = 0) -> list[int]:
    """Gradient sizes that add up to about `total` elements, each plus `extra`: 1 misaligns all unaligned slots."""
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(min(NUMELS[len(sizes) % len(NUMELS)], total - sum(sizes)) + extra)
    return sizes


def random_gradients(numels: Sequence[int], device: torch.device, seed: int) -> list[Tensor]:
    """Random values: equal ones would hide a write to the wrong place."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(numel, generator=generator, device=device) for numel in numels]


def is_pack(event: DeviceEvent) -> bool:
    """Whether this is our packing kernel."""
    return event.kind == "kernel" and "pack_kernel" in event.name


def time_pack(job: GpuJob, device: torch.device, report: Report) -> list[dict[str, Any]]:
    """One table per bucket size."""
    sizes = QUICK_BYTES if job.quick else BYTES
    return for_each_size(sizes, report, lambda size: _time_size(job, size, device))


def _copy_us(elements: int, device: torch.device) -> np.ndarray:
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return device_us(lambda: target.copy_(source), device, lambda event: event.kind != "fill")


def packing_step(gradients: Sequence[Tensor], divisor: int) -> GivenStep:
    """A step over the process group, where the bucket is torch's memory, like that of a plain copy."""
    return GivenStep(gradients, divisor=divisor, transport="c10d")


def unaligned_step(gradients: Sequence[Tensor], divisor: int) -> GivenStep:
    """A step whose gradients are not aligned in their bucket. RuntimeError if all are aligned anyway."""
    with mock.patch.object(model, "SLOT_ALIGNMENT_BYTES", 1):
        step = packing_step(gradients, divisor)
    if not any(offset % model.SLOT_ALIGNMENT_BYTES for offset in step.offsets_bytes()):
        raise RuntimeError(f"all slots begin at multiples of {model.SLOT_ALIGNMENT_BYTES} bytes: none is unaligned")
    return step


def _pack_us(step: GivenStep, world_size: int, device: torch.device) -> np.ndarray:
    step.check(world_size)
    times_us = device_us(step, device, is_pack)
    if not times_us.all():
        raise RuntimeError("the profiler saw none of our packing kernels")
    return times_us


def _time_size(job: GpuJob, size: int, device: torch.device) -> dict[str, Any]:
    world_size = job.world_size
    gradients, shifted = (random_gradients(numels_of(size // 4, extra), device, job.seed) for extra in (0, 1))
    times_us = {
        "copy": _copy_us(size // 4, device),
        "torchddp pack": _pack_us(packing_step(gradients, world_size), world_size, device),
        "torchddp pack, times 1/2": _pack_us(packing_step(gradients, 2 * world_size), world_size, device),
        "torchddp pack, times 1/2, unaligned slots": _pack_us(
            unaligned_step(shifted, 2 * world_size), world_size, device
        ),
    }
    title = f"{size // MIB} MiB in {len(gradients)} gradients, {timed_what(device)}"
    return duel(PACK_CASE, title, times_us, bytes=2 * size, goal={"torchddp pack, times 1/2": PACK_GOAL})
