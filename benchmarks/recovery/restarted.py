"""A rank that torchrun restarts with all others, and that resumes from the last checkpoint.

torchrun --standalone --nproc-per-node N --max-restarts 1 -m benchmarks.recovery.restarted PORT DIE_AT FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

import torchddp
from benchmarks.recovery.training import AFTER, Trial, backward, make_network

SAVE_EVERY = 10


def train(trial: Trial, die_at: int, checkpoint: Path, attempt: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    network = make_network()
    model = torchddp.DistributedDataParallel(network, timeout=60, bucket_cap_mb=0.3)
    optimizer = torch.optim.AdamW(model.parameters())
    first = 0
    if attempt:
        saved = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, die_at + AFTER):
        optimizer.zero_grad()
        if attempt == 0 and step == die_at and rank == world_size - 1:
            trial.die_in_backward(network)
        backward(model)
        optimizer.step()
        if attempt and step == first:
            trial.report(die_at - first, committed=time.monotonic())
        if (step + 1) % SAVE_EVERY == 0 and rank == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


def main() -> None:
    port, die_at, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    store, rank, world_size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    train(Trial(port), die_at, folder / "checkpoint.pt", attempt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
