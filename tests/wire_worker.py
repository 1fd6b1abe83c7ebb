"""One rank of two hosts: trains some steps, and says what its model counted and what the kernel counted on the link."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchddp
from benchmarks.two_hosts.traffic import quiet_count

STEPS = 4


def measure(route: str, **options: Any) -> dict[str, float]:
    """Bytes of one step: as `model.traffic()` has them, and as the interface of this host has them."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    ddp = torchddp.DistributedDataParallel(layers, **options)

    def step() -> None:
        ddp(torch.ones(2, 512)).sum().backward()

    for _ in range(2):  # buckets are rebuilt
        step()
    before = quiet_count()
    for _ in range(STEPS):
        step()
    sent = (quiet_count() - before) / STEPS
    return {"counted": ddp.traffic()[route].wire_bytes or 0, "sent": sent}


def main(rank: int, world_size: int, init_method: str) -> None:
    """Prints what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    if world_size == 2:
        found = {"c10d": measure("c10d", transport="c10d")}
    else:  # ranks of a host share memory
        narrow = measure("outer", transport="shm", wire_dtype=torch.bfloat16)
        found = {"outer": measure("outer", transport="shm"), "narrow": narrow}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
