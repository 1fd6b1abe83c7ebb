"""The model that ranks train, its data, and its expected gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.chaos.outcome import StepRecord
from benchmarks.chaos.plan import NUM_GRADIENTS

# One fits into an operation's slot, one is a single chunk, one has many chunks that ranks steal from each other.
NUMELS = (50, 5_000, 60_000, 300)
assert len(NUMELS) == NUM_GRADIENTS
LEARNING_RATE = 1 / 64


def stamp(rank: int, step: int, index: int) -> Tensor:
    """One rank's data for one parameter in one step; each rank can compute that of the others."""
    return (rank + 3 * step + index + torch.arange(NUMELS[index], dtype=torch.float32) % 7) / 8


class Stamped(nn.Module):
    """A sum of squared weights times data, computed elementwise, so that every process gets the same bits.

    Args:
        has_unused: adds a parameter that is not used.
        visit: called as `visit("forward")`, and as `visit("hook", index)` when gradient number `index` is ready.
    """

    def __init__(self, has_unused: bool, visit: Callable[..., None] = lambda *_: None) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(numel) for numel in NUMELS)
        if has_unused:
            self.unused = nn.Parameter(torch.ones(7))
        self.visit = visit

    def forward(self, rank: int, step: int) -> Tensor:
        self.visit("forward")
        total = torch.zeros(())
        for index, weight in enumerate(self.weights):
            squares = weight * weight * stamp(rank, step, index)
            squares.register_hook(lambda grad, index=index: self.visit("hook", index))
            total = total + squares.sum()
        return total


def make_optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of both the ranks and the simulation."""
    return torch.optim.SGD(params, lr=LEARNING_RATE)


def gradients(model: nn.Module) -> list[Tensor | None]:
    """The model's gradients, in parameter order."""
    return [None if p.grad is None else p.grad.detach() for p in model.parameters()]


def mean_gradients(model: nn.Module, ranks: Sequence[int], step: int) -> list[Tensor | None]:
    """The mean gradients of one data-parallel step, computed in this process; overwrites the model's gradients.

    Each rank's gradients are scaled by one over the number of ranks and summed in rank order, in fp32.
    """
    means: list[Tensor | None] = [None for _ in model.parameters()]
    for rank in ranks:
        model.zero_grad()
        model(rank, step).backward()
        for index, grad in enumerate(gradients(model)):
            if grad is not None:
                scaled, before = grad * (1 / len(ranks)), means[index]
                means[index] = scaled if before is None else before + scaled
    return means


def simulate(ranks: Sequence[int], steps: int, has_unused: bool = False) -> list[list[Tensor | None]]:
    """The gradients that data-parallel training of these ranks must produce, step by step; see `mean_gradients`."""
    model = Stamped(has_unused)
    optimizer = make_optimizer(model.parameters())
    by_step = []
    for step in range(steps):
        means = mean_gradients(model, ranks, step)
        for param, mean in zip(model.parameters(), means, strict=True):
            param.grad = mean
        optimizer.step()
        by_step.append(means)
    return by_step


def digest(grads: Sequence[Tensor | None]) -> str:
    """A hash of the bytes of all gradients, and of which ones are None."""
    hashed = hashlib.sha256()
    for grad in grads:
        hashed.update(b"-" if grad is None else grad.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def deviation(grads: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest difference relative to the largest element; infinite if a gradient is missing or not finite."""
    worst = 0.0
    for grad, want in zip(grads, expected, strict=True):
        if (grad is None) != (want is None):
            return float("inf")
        if grad is not None and want is not None:
            relative = ((grad - want).abs().max() / want.abs().max()).item()
            worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def record_step(step: int, model: nn.Module, expected: Sequence[Tensor | None]) -> StepRecord:
    """Compares the model's current gradients with the expected ones."""
    got = gradients(model)
    return StepRecord(step, digest(got), digest(expected), deviation(got, expected))
