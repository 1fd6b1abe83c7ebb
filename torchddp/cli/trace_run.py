"""What each rank does for `torchddp trace`: some steps to warm up, then steps that are recorded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchddp.bench.model_spec import run_forward
from torchddp.bench.models import find_model, make_batch, make_model
from torchddp.distributed import DistributedDataParallel
from torchddp.profiler.merge import MergedProfile
from torchddp.profiler.session import profile

# Buckets are rebuilt at the second step; memory and caches are warm some steps later.
WARMUP_STEPS = 5


@dataclass(frozen=True)
class TraceSettings:
    """What the command line asked for, checked."""

    model: str
    world_size: int
    steps: int
    bucket_cap_mb: float | None
    transport: str
    seed: int = 0


@dataclass(frozen=True)
class Traced:
    """What the ranks found."""

    profile: MergedProfile
    transport: str  # that moved the buckets
    device: str


def local_ranks(world_size: int) -> int:
    """How many ranks share this host: torchrun says so, else all do."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def choose_backend(world_size: int) -> str:
    """NCCL if each rank of this host can have a GPU of its own, gloo on the CPU otherwise."""
    return "nccl" if 0 < local_ranks(world_size) <= torch.cuda.device_count() else "gloo"


def trace_rank(report: Callable[[float, float], None], settings: TraceSettings) -> Traced:
    """One rank's part; collective. Every rank returns the same."""
    rank = dist.get_rank()
    module = make_model(settings.model, settings.seed)
    device_ids = None
    if dist.get_backend() == "nccl":
        index = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(index)
        module.cuda(index)
        device_ids = [index]  # batches are moved there too
    ddp = DistributedDataParallel(
        module, device_ids=device_ids, bucket_cap_mb=settings.bucket_cap_mb, transport=settings.transport
    )
    loss_of = find_model(settings.model).loss
    total = WARMUP_STEPS + settings.steps

    def step(index: int) -> None:
        ddp.zero_grad(set_to_none=True)
        loss_of(run_forward(ddp, make_batch(settings.model, settings.seed, rank, index))).backward()
        report(index + 1, total)

    for index in range(WARMUP_STEPS):
        step(index)
    with profile(ddp, steps=settings.steps) as recorded:
        for index in range(WARMUP_STEPS, total):
            step(index)
    return Traced(recorded.gather(), ddp.reducer.transport_name, ddp.device_type)
