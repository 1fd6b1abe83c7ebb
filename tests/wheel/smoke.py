"""Two ranks train with torch's class and ours; scripts/test_wheel.py starts this with torchrun next to the wheel."""

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn

import torchddp

STEPS = 3


def train(wrap, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(37, 65), nn.ReLU(), nn.Linear(65, 700), nn.Linear(700, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(5, 37, generator=generator)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def check_training() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    expected = train(nn.parallel.DistributedDataParallel, rank)
    assert any(not torch.equal(a, b) for a, b in zip(expected, train(lambda model: model, rank), strict=True))
    for transport in ("shm", "c10d"):
        ours = train(lambda model, t=transport: torchddp.DistributedDataParallel(model, transport=t), rank)
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    # What a hook sends goes through groups of its own, which find each other though rank 0 has made one more.
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    train(lambda model: torchddp.DistributedDataParallel(model, comm_hook="int8"), rank)
    dist.destroy_process_group()
    # The models hold the process group too. Its threads must end before Python does: gloo's take the GIL when they drop
    # an operation, and a thread that waits for the GIL while Python shuts down aborts the process.
    gc.collect()


def main() -> None:
    installed = Path(torchddp.__file__).resolve()
    assert installed.is_relative_to(Path(sys.prefix).resolve()), f"{installed} is not the wheel's"
    check_training()
    if os.environ["RANK"] == "0":
        world_size = os.environ["WORLD_SIZE"]
        print(
            f"torchddp {torchddp.__version__}: {STEPS} steps on {world_size} ranks, the same weights as torch's class"
        )


if __name__ == "__main__":
    main()
