"""Shard gradients and optimizer state over the ranks (ZeRO-2), with gradient clipping and a checkpoint.

torchrun --nproc-per-node 2 -m examples.train_sharded
torchrun --nproc-per-node 2 -m examples.train_sharded --checkpoint runs/sharded.pt
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.ranks import Ranks, open_ranks
from examples.small import loss_of, make_model, report
from torchddp import ShardedDataParallel, finished_steps
from torchddp.optim import OSS


def train(ranks: Ranks, steps: int, lr: float, checkpoint: Path | None) -> None:
    """Train on this rank; each rank updates the parameters that it owns."""
    module = make_model()
    optimizer = OSS(module.parameters(), optim=torch.optim.AdamW, lr=lr)
    model = ShardedDataParallel(module, optimizer)
    for step in range(steps):
        loss = loss_of(model, ranks.rank, step)
        loss.backward()
        optimizer.clip_grad_norm(1.0)  # over all ranks' gradients
        optimizer.step()
        optimizer.zero_grad()
        report(ranks, step, steps, loss)
    owned = sum(p.numel() for p, owner in optimizer.param_to_rank.items() if owner == ranks.rank)
    total = sum(p.numel() for p in model.parameters())
    if checkpoint is not None:
        optimizer.consolidate_state_dict(0)  # collective; the file has plain AdamW's format
        if ranks.rank == 0:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    if ranks.rank == 0:
        print(f"this rank holds optimizer state for {owned} of {total} parameters")
        print(f"steps reduced by torchddp: {finished_steps()}")


def main() -> None:
    """Join the process group, train, and leave it."""
    parser = argparse.ArgumentParser(description="Train with sharded gradients and optimizer state.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps [%(default)s]")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate [%(default)s]")
    parser.add_argument("--checkpoint", type=Path, help="save model and optimizer here at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with open_ranks("torchddp", "cpu") as ranks:
        train(ranks, arguments.steps, arguments.lr, arguments.checkpoint)


if __name__ == "__main__":
    main()
