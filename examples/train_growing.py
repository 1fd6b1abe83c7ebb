"""Progressive growing (Karras et al. 2018, on a small scale): add blocks during training.

torchrun --nproc-per-node 2 -m examples.train_growing
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.ranks import Ranks
from examples.small import Block, Regressor, loss_of, report, run
from torchddp import DistributedDataParallel as DDP

DEPTH = 3


def train(ranks: Ranks, steps: int, lr: float) -> None:
    """Start with one block, and add the others at equal intervals."""
    torch.manual_seed(0)
    model = DDP(Regressor(depth=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        if step > 0 and step % (steps // DEPTH) == 0 and len(model.module.blocks) < DEPTH:
            block = Block()
            nn.init.zeros_(block.down.weight)  # the model's output doesn't change
            nn.init.zeros_(block.down.bias)
            model.module.blocks.append(block)
            model.refresh_trainable()  # on all ranks: the block gets rank 0's values
            optimizer.add_param_group({"params": list(block.parameters())})
        loss = loss_of(model, ranks.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(ranks, step, steps, loss)
    if ranks.rank == 0:
        updates = [int(optimizer.state[block.up.weight]["step"]) for block in model.module.blocks]
        print(f"updates of the blocks: {', '.join(map(str, updates))}")


def main() -> None:
    """Join the process group, train, and leave it."""
    run(train, "Add blocks to a model during training.", steps=150)


if __name__ == "__main__":
    main()
