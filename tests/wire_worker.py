"""One rank of two hosts: trains some steps, and says what its model counted and what the kernel counted on the link."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import torchddp
from benchmarks.two_hosts.traffic import quiet_count
from torchddp.traffic import total_wire_bytes

STEPS = 4


def measure(transport: str, **options: object) -> dict[str, float]:
    """Bytes of one step: as `model.traffic()` has them, and as the interface has them."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    ddp = torchddp.DistributedDataParallel(layers, transport=transport, **options)  # type: ignore[arg-type]

    def step() -> None:
        ddp(torch.ones(2, 512)).sum().backward()

    for _ in range(2):  # buckets are rebuilt, weights were sent
        step()
    before = quiet_count()
    for _ in range(STEPS):
        step()
    sent = (quiet_count() - before) / STEPS
    return {"counted": total_wire_bytes(ddp.traffic()) or 0, "sent": sent}


def main(rank: int, address: str, port: int) -> None:
    """Both ranks print theirs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=2)
    result = {
        "c10d": measure("c10d"),
        "decoupled": measure("c10d", decoupled=True),
        "hosts": measure("shm"),
        "hosts_narrow": measure("shm", wire_dtype=torch.bfloat16),
    }
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
