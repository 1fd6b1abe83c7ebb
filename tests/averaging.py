"""Models, batches and simulations shared by the tests of torchddp.averaging."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.harness import through_a_file
from tests.models import seeded

WIDTH = 12
EXACT = {"rtol": 0.0, "atol": 0.0}
ROUNDING = {"rtol": 1e-11, "atol": 1e-13}  # of float64
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


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


def local_backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    model(batch_of(rank, step, next(model.parameters()).dtype)).square().mean().backward()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        local_backward(model, rank, step)
        optimizer.step()


def train_side_by_side(rank: int, steps: range, *sides: tuple[Any, ...], **tolerance: float) -> None:
    """Train each side (model, optimizer, calls after each step); the models must be close after each step."""
    for step in steps:
        for model, optimizer, *after in sides:
            train(model, optimizer, rank, range(step, step + 1))
            for call in after:
                call()
        assert_close(sides[0][0], sides[1][0], **tolerance)


def assert_same_on_all_ranks(model: nn.Module) -> None:
    """Assert that the parameters are bitwise equal on all ranks."""
    for name, param in model.named_parameters():
        mine = param.detach().contiguous().view(torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, mine)
        assert all(torch.equal(other, mine) for other in theirs), name


def assert_close(model: nn.Module, other: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), **tolerance)


def assert_resumes_exactly(rank: int, make: Callable[[], tuple[nn.Module, Any]], saved_after: list[int]) -> None:
    """A run that saves, one resumed from its checkpoint, and one that never saves end bitwise equal."""
    uninterrupted, optimizer = make()
    train(uninterrupted, optimizer, rank, range(15))
    for steps in saved_after:
        model, optimizer = make()
        train(model, optimizer, rank, range(steps))
        saved = through_a_file((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, rank, range(steps, 15))
        assert_close(model, uninterrupted, **EXACT)

        again, resumed = make()
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(again, resumed, rank, range(steps, 15))
        assert_close(again, uninterrupted, **EXACT)


class Simulation:
    """All ranks in one process, each with its own model."""

    def __init__(self, world_size: int, make_optimizer: MakeOptimizer, dtype: torch.dtype = torch.float32) -> None:
        self.models = [make_net(0, dtype) for _ in range(world_size)]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]

    def train(self, steps: range) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            train(model, optimizer, rank, steps)

    def trained(self) -> list[list[nn.Parameter]]:
        return [[p for p in model.parameters() if p.requires_grad] for model in self.models]

    @torch.no_grad()
    def means(self) -> list[torch.Tensor]:
        return [torch.stack(list(same)).mean(0) for same in zip(*self.trained(), strict=True)]

    @torch.no_grad()
    def write(self, weights: list[torch.Tensor]) -> None:
        for params in self.trained():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)
