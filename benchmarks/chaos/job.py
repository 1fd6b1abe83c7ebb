"""The model that ranks train, its data, and what its gradients must be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.chaos.outcome import StepRecord
from benchmarks.chaos.plan import NUM_GRADIENTS

# One travels in the slot of an operation, one is a single chunk, one is many that ranks take from each other.
NUMELS = (50, 5_000, 60_000, 300)
assert len(NUMELS) == NUM_GRADIENTS
LEARNING_RATE = 1 / 64


def stamp(rank: int, step: int, index: int) -> Tensor:
    """The data of one rank in one step for one parameter: each rank can compute those of the others."""
    return (rank + 3 * step + index + torch.arange(NUMELS[index], dtype=torch.float32) % 7) / 8


class Stamped(nn.Module):
    """Squares of weights times data: element by element, so that any process gets the same bits.

    Args:
        has_unused: one more parameter, that takes no part.
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
    """The same for ranks and simulation."""
    return torch.optim.SGD(params, lr=LEARNING_RATE)


def gradients(model: nn.Module) -> list[Tensor | None]:
    """In the order of parameters."""
    return [None if p.grad is None else p.grad.detach() for p in model.parameters()]


def mean_gradients(model: nn.Module, ranks: Sequence[int], step: int) -> list[Tensor | None]:
    """Of one step of data-parallel training, computed in this process alone; changes the model's gradients.

    Each rank's are scaled by one over their number and summed in rank order, in fp32.
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
    """By step: the gradients that data-parallel training of these ranks must give, see `mean_gradients`."""
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
    """Of the bytes of all, and of which there are."""
    hashed = hashlib.sha256()
    for grad in grads:
        hashed.update(b"-" if grad is None else grad.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


def deviation(grads: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest difference relative to the largest element; infinite where one is missing or not finite."""
    worst = 0.0
    for grad, want in zip(grads, expected, strict=True):
        if (grad is None) != (want is None):
            return float("inf")
        if grad is not None and want is not None:
            relative = ((grad - want).abs().max() / want.abs().max()).item()
            worst = max(worst, relative if relative == relative else float("inf"))
    return worst


def record_step(step: int, model: nn.Module, expected: Sequence[Tensor | None]) -> StepRecord:
    """How the gradients are that a model has now."""
    got = gradients(model)
    return StepRecord(step, digest(got), digest(expected), deviation(got, expected))
