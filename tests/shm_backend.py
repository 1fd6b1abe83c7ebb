"""Helpers for the tests of the torchddp_shm backend."""

import torch
import torch.distributed as dist

BACKEND = "torchddp_shm"


def stamp(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers that differ between ranks and between neighbors."""
    return ((rank * 3 + torch.arange(numel)) % 5 + 1).to(dtype)


def shm_group(**options) -> dist.ProcessGroup:
    return dist.new_group(backend=BACKEND, **options)
