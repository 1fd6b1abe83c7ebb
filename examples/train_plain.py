"""A training loop as it is written for torch's DistributedDataParallel, with one import changed.

torchrun --nproc-per-node 2 -m examples.train_plain
python -m examples.train_plain --steps 200
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
from torchddp import DistributedDataParallel as DDP  # instead of: from torch.nn.parallel import ...
from torchddp import finished_steps


def train(ranks: Ranks, steps: int, lr: float) -> None:
    """Train on this rank, with gradients averaged over all."""
    model = DDP(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        loss = loss_of(model, ranks.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(ranks, step, steps, loss)
    if ranks.rank == 0:
        print(f"steps reduced by torchddp: {finished_steps()}")


def main() -> None:
    """Join the process group, train, leave it."""
    parser = argparse.ArgumentParser(description="Data parallel training of a small model, one import changed.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps [%(default)s]")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate [%(default)s]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with open_ranks("torchddp", "cpu") as ranks:
        train(ranks, arguments.steps, arguments.lr)


if __name__ == "__main__":
    main()
