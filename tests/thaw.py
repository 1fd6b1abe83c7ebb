"""Random schedules of freezing, thawing, adding and accumulating, on a model that is refreshed and one wrapped anew."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import torchddp
from tests.models import seeded

WIDTH = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


class Tower(nn.Module):
    """Layers of unlike sizes, one after the other; some have batch norm. It can grow."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(number) for number in range(depth))
        self.head = nn.Linear(WIDTH, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def parts(self) -> list[nn.Module]:
        """What is frozen and thawed as one."""
        return [*self.layers, self.head]


def make_layer(number: int) -> nn.Sequential:
    inner = 4 + 3 * number
    norm: list[nn.Module] = [nn.BatchNorm1d(inner, dtype=torch.float64)] if number % 2 else []
    return nn.Sequential(
        nn.Linear(WIDTH, inner, dtype=torch.float64), *norm, nn.Tanh(), nn.Linear(inner, WIDTH, dtype=torch.float64)
    )


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


class Refreshed:
    """One wrapper all along."""

    def __init__(self, make: Callable[[nn.Module], Any], module: Tower, *, is_told: bool = True) -> None:
        self.module = module
        self.model = make(module)
        self._is_told = is_told

    def changed(self) -> None:
        if self._is_told:
            self.model.refresh_trainable()


class Rewrapped:
    """Another wrapper after each change, over the same module."""

    def __init__(self, make: Callable[[nn.Module], Any], module: Tower) -> None:
        self.module = module
        self._make = make
        self.model = make(module)

    def changed(self) -> None:
        self.model = None  # which takes its hooks along
        if isinstance(self.module, torchddp.composable.ReplicateModule):
            torchddp.composable.unreplicate(self.module)
        self.model = self._make(self.module)


@dataclass
class Side:
    """A model in training."""

    wrapper: Refreshed | Rewrapped
    optimizer: torch.optim.Optimizer
    is_told_at_once: bool  # of changes

    @property
    def module(self) -> Tower:
        return self.wrapper.module

    def step(self, rank: int, steps: list[int], *, keeps_gradients: bool = False) -> None:
        """One update: all but the last microbatch under no_sync."""
        for number in steps[:-1]:
            self.accumulate(rank, number)
        self.wrapper.model(batch(rank, steps[-1])).square().mean().backward()
        self.optimizer.step()
        if not keeps_gradients:
            self.optimizer.zero_grad()

    def accumulate(self, rank: int, number: int) -> None:
        with self.wrapper.model.no_sync():
            self.wrapper.model(batch(rank, number)).square().mean().backward()


CHANGES = ("freeze", "thaw", "add")


def play(rank: int, seed: int, sides: list[Side], check: Callable[[bool], None], length: int = 12) -> int:
    """Does the same to all sides; how many times the models were changed.

    ``check`` is called after each action, with whether that was a forward: then buffers are the same too.
    """
    draw = random.Random(seed)
    changes = 0
    for number in range(length):
        action = draw.choice((*CHANGES, "accumulate", "step", "step", "step of two", "kept"))
        which = draw.randrange(100)
        changes += action in CHANGES
        for side in sides:
            _act(side, action, which, rank, 10 * number)
        check(action not in CHANGES)
    for side in sides:
        side.step(rank, [10 * length])
    check(True)
    return changes


def _act(side: Side, action: str, which: int, rank: int, number: int) -> None:
    parts = side.module.parts()
    if action == "accumulate":
        side.accumulate(rank, number)
    elif action == "step":
        side.step(rank, [number])
    elif action == "step of two":
        side.step(rank, [number, number + 1])
    elif action == "kept":
        side.step(rank, [number], keeps_gradients=True)
    elif action == "thaw":
        parts[which % len(parts)].requires_grad_(True)
        side.wrapper.changed()
    elif action == "freeze":
        part = parts[which % len(parts)]
        if sum(any(p.requires_grad for p in other.parameters()) for other in parts if other is not part) > 0:
            part.requires_grad_(False)
            for parameter in part.parameters():
                parameter.grad = None  # what it has accumulated would be this rank's alone
        side.wrapper.changed()
    else:
        # Other values on each rank, where they are sent before they are used.
        torch.manual_seed(100 * number + (rank if side.is_told_at_once else 0))
        layer = make_layer(len(side.module.layers))
        side.module.layers.append(layer)
        side.wrapper.changed()
        side.optimizer.add_param_group({"params": list(layer.parameters())})


def sides_of(
    make_ours: Callable[[nn.Module], Any],
    make_fresh: Callable[[nn.Module], Any],
    optimizer: str,
    *,
    is_told: bool = True,
) -> list[Side]:
    module = seeded(Tower)
    twin = copy.deepcopy(module)
    return [
        Side(Refreshed(make_ours, module, is_told=is_told), OPTIMIZERS[optimizer](module.parameters()), is_told),
        Side(Rewrapped(make_fresh, twin), OPTIMIZERS[optimizer](twin.parameters()), is_told),
    ]


def assert_equal(sides: list[Side], *, buffers: bool = True) -> None:
    """Parameters, gradients, what the optimizers hold, and buffers: bit for bit."""

    def same(mine: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
        assert torch.equal(mine, theirs), name

    ours, fresh = sides
    for (name, mine), theirs in zip(ours.module.named_parameters(), fresh.module.parameters(), strict=True):
        same(mine, theirs, name)
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            same(mine.grad, theirs.grad, f"gradient of {name}")
        one, other = ours.optimizer.state[mine], fresh.optimizer.state[theirs]
        assert one.keys() == other.keys()
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                same(value, other[key], f"{key} of {name}")
    for (name, mine), theirs in zip(ours.module.named_buffers(), fresh.module.buffers(), strict=True):
        if buffers:
            same(mine, theirs, name)
