"""A training loop for torch's DistributedDataParallel, with one import changed.

torchrun --nproc-per-node 2 -m examples.train_plain
python -m examples.train_plain --steps 200
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.ranks import Ranks
from examples.small import loss_of, make_model, report, run
from torchddp import DistributedDataParallel as DDP  # instead of: from torch.nn.parallel import ...
from torchddp import finished_steps


def train(ranks: Ranks, steps: int, lr: float) -> None:
    """Train on this rank, with gradients averaged over all ranks."""
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
    """Join the process group, train, and leave it."""
    run(train, "Data parallel training of a small model, one import changed.", steps=100)


if __name__ == "__main__":
    main()
