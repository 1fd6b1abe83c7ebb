"""Two models side by side, one with OSS, one with the plain optimizer: they must never differ by a bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import torchddp
from tests.harness import gathered
from tests.models import Mlp, batch, loss_of, seeded
from torchddp.optim import OSS

float_mlp = partial(Mlp, dtype=torch.float32)


@dataclass
class Twins:
    """The same model twice, in DDP, and their optimizers."""

    ddp: torch.nn.Module
    oss: OSS
    plain_ddp: torch.nn.Module
    plain: torch.optim.Optimizer

    def backward(self, step: int, same_batch: bool = False) -> None:
        """Averaged gradients on both models. Those of the same batch on all ranks need no averaging: they are the same
        bits on any number of ranks.
        """
        rank = 0 if same_batch else dist.get_rank()
        for ddp, optimizer in self.pairs():
            optimizer.zero_grad()
            model = ddp.module if same_batch else ddp
            loss_of(model(batch(rank, step, dtype=torch.float32))).backward()

    def train(self, steps: range, same_batch: bool = False) -> None:
        for step in steps:
            self.backward(step, same_batch=same_batch)
            self.oss.step()
            self.plain.step()

    def pairs(self) -> list[tuple[torch.nn.Module, torch.optim.Optimizer]]:
        return [(self.ddp, self.oss), (self.plain_ddp, self.plain)]

    def assert_equal(self) -> None:
        for (name, mine), other in zip(self.ddp.named_parameters(), self.plain_ddp.parameters(), strict=True):
            assert torch.equal(mine, other), name


def twins(
    optim: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    groups: Callable[[torch.nn.Module], Any] = lambda model: model.parameters(),
    make: Callable[[], torch.nn.Module] = float_mlp,
    **oss_options: Any,
) -> Twins:
    models = [seeded(make), seeded(make)]
    oss = OSS(groups(models[0]), optim, **oss_options, **copy.deepcopy(options or {}))
    plain = optim(groups(models[1]), **copy.deepcopy(options or {}))
    wrapped = [torchddp.DistributedDataParallel(model) for model in models]
    return Twins(wrapped[0], oss, wrapped[1], plain)


def whole_state(oss: OSS) -> dict[str, Any]:
    """On all ranks (a collective)."""
    oss.consolidate_state_dict(0)
    return gathered(oss.state_dict() if oss.rank == 0 else None)[0]


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": list(model.first.parameters()), "lr": 0.02},
        {"params": [*model.middle.parameters(), *model.last.parameters()]},
    ]


def assert_same_state(mine: Any, other: Any, where: str = "state_dict") -> None:
    """Equal in form and bit for bit."""
    assert type(mine) is type(other), (where, type(mine), type(other))
    if isinstance(mine, dict):
        assert set(mine) == set(other), (where, list(mine), list(other))
        for key in mine:
            assert_same_state(mine[key], other[key], f"{where}[{key!r}]")
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(other), where
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert_same_state(a, b, f"{where}[{index}]")
    elif isinstance(mine, torch.Tensor):
        assert mine.dtype == other.dtype and torch.equal(mine, other), where
    else:
        assert mine == other, where
