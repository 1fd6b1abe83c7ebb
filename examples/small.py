"""The model of the small examples: a few residual blocks that learn a fixed function of random inputs."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn

from examples.gpt.ranks import Ranks, open_ranks

WIDTH = 32
REPORTS = 5  # lines with a loss


class Block(nn.Module):
    """x + MLP(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Regressor(nn.Module):
    """Maps inputs [batch, WIDTH] to predictions [batch, 1]."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(seed: int = 0) -> Regressor:
    """Build the model, with the same weights in every process."""
    torch.manual_seed(seed)
    return Regressor()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Mean squared error on the batch that this rank draws in this step."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    target = torch.tanh(x[:, :8].sum(1, keepdim=True))
    error: torch.Tensor = model(x) - target
    return error.square().mean()


def report(ranks: Ranks, step: int, steps: int, loss: torch.Tensor) -> None:
    """Print the mean loss over the ranks, about REPORTS times a run. Collective: call it in every step."""
    if step % max(1, steps // REPORTS) == 0 or step == steps - 1:
        mean = sum(ranks.sums([loss.item()])) / ranks.world_size
        if ranks.rank == 0:
            print(f"step {step}: loss {mean:.4f}", flush=True)


def run(train: Callable[[Ranks, int, float], None], about: str, steps: int) -> None:
    """Parse an example's arguments, join the process group, train on this rank, and leave the group."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps [%(default)s]")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate [%(default)s]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with open_ranks("torchddp", "cpu") as ranks:
        train(ranks, arguments.steps, arguments.lr)
