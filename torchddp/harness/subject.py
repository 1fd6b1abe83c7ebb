"""The model that a command runs, wrapped and on its rank's device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from torchddp.ddp.module import DistributedDataParallel
from torchddp.ddp.options import TransportChoice
from torchddp.errors import TransportError
from torchddp.harness.command import ModelSettings
from torchddp.harness.machine import available_cores
from torchddp.harness.models import find_model, make_batch, make_model, prove, run_forward
from torchddp.harness.variants import ArgumentError, one_line


@dataclass(frozen=True)
class Subject:
    """A wrapped model and its step: zero the gradients, forward, backward. `step(i)` uses this rank's batch i."""

    model: DistributedDataParallel
    device: torch.device
    step: Callable[[int], None]


def local_ranks(world_size: int) -> int:
    """The number of ranks on this host, from torchrun's environment; without it, all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def choose_backend(world_size: int) -> str:
    """NCCL if each rank of this host can have its own GPU; otherwise gloo, on the CPU."""
    return "nccl" if 0 < local_ranks(world_size) <= torch.cuda.device_count() else "gloo"


def threads_each(world_size: int) -> int:
    """Threads per rank: the cores divided among the ranks. Ranks started by torchrun keep their own number."""
    return max(1, available_cores() // local_ranks(world_size))


def make_subject(settings: ModelSettings, bucket_cap_mb: float | None = None) -> Subject:
    """Wrap a built-in model, or the user's own at `package.module:factory`. Collective. ArgumentError if that fails."""
    name, seed, rank = settings.model, settings.seed, dist.get_rank()
    if ":" in name:
        prove(name, seed, find_unused_parameters=settings.find_unused_parameters)
    module = make_model(name, seed)
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        module.to(device)
    # With device_ids, the model moves batches there too.
    device_ids = None if device.index is None else [device.index]
    try:
        model = DistributedDataParallel(
            module,
            device_ids=device_ids,
            bucket_cap_mb=bucket_cap_mb,
            transport=cast("TransportChoice", settings.transport),
            find_unused_parameters=settings.find_unused_parameters,
        )
    except (ValueError, RuntimeError) as error:
        if settings.transport == "auto" or isinstance(error, TransportError):
            raise
        raise ArgumentError(f"--transport {settings.transport}: {one_line(error)}.") from error
    loss_of = find_model(name, seed).loss

    # A repeated step must not include the time to make a batch.
    @functools.lru_cache(maxsize=2)
    def batch(index: int) -> object:
        return make_batch(name, seed, rank, index)

    def step(index: int) -> None:
        model.zero_grad(set_to_none=True)
        loss_of(run_forward(model, batch(index))).backward()

    return Subject(model, device, step)
