"""Models and batches shared by the tests of torchddp.averaging."""

from typing import Any

import torch
from torch import nn

from tests.models import same_on_all_ranks, seeded

WIDTH = 12
EXACT = {"rtol": 0.0, "atol": 0.0}
ROUNDING = {"rtol": 1e-11, "atol": 1e-13}  # of float64


class Net(nn.Module):
    """Numbered blocks, a convolution with a channels-last weight, and running statistics."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 20, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(20, 20, dtype=dtype) for _ in range(3))
        self.norm = nn.BatchNorm1d(20, dtype=dtype)
        self.conv = nn.Conv2d(2, 3, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.conv(self.norm(hidden).view(-1, 2, 2, 5))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def make_net(rank: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    return seeded(lambda: Net(dtype), seed=rank)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        model(batch_of(rank, step, next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def assert_same_on_all_ranks(model: nn.Module) -> None:
    """Assert that the parameters are bitwise equal on all ranks."""
    assert same_on_all_ranks(param.detach().contiguous().view(torch.uint8) for param in model.parameters())


def assert_close(model: nn.Module, other: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), **tolerance)
