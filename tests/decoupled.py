"""A decoupled model beside an ordinary one, each with its optimizer, on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.models import seeded
from tests.sharded import Net, batch_of, loss_of, reference_of
from torchddp.optim import DeferredOptimizer

WIDTH = 16


class Shared(nn.Module):
    """Two layers with one weight, a layer called twice, and one that some forwards leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, 3)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, with_all: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(self.first(x)))))
        return self.last(self.sometimes(hidden) if with_all else hidden)


@dataclass
class Pair:
    """Decoupled, and as it is."""

    model: torchddp.DistributedDataParallel
    optimizer: Any
    reference: nn.Module
    plain: torch.optim.Optimizer
    rank: int = field(default_factory=dist.get_rank)

    def sides(self) -> list[tuple[Any, Any]]:
        return [(self.model, self.optimizer), (self.reference, self.plain)]

    def backward(self, step: int, **forward: Any) -> None:
        for model, _ in self.sides():
            loss_of(model(batch_of(self.rank, step), **forward)).backward()

    def step(self, **zero_grad: Any) -> None:
        for _, optimizer in self.sides():
            optimizer.step()
            optimizer.zero_grad(**zero_grad)

    def train(self, steps: range, **zero_grad: Any) -> None:
        for step in steps:
            self.backward(step)
            self.step(**zero_grad)

    def assert_equal(self, rtol: float = 0.0, atol: float = 0.0) -> None:
        """Parameters and gradients."""
        theirs = dict(self.reference.module.named_parameters())
        for name, value in self.model.module.named_parameters():
            torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
            assert (value.grad is None) == (theirs[name].grad is None), name
            if value.grad is not None:
                torch.testing.assert_close(value.grad, theirs[name].grad, rtol=rtol, atol=atol)


def make_pair(
    optim: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    make: Callable[[], nn.Module] = Net,
    deferred: bool = True,
    **model_options: Any,
) -> Pair:
    """Collective. Several buckets, and gloo, through which gathers are deferred, unless the options say otherwise."""
    model_options = {"bucket_cap_mb": 0.002, "transport": "c10d", **model_options}
    one, other = seeded(make), seeded(make)
    options = options or {"lr": 0.01}
    shared = {key: model_options[key] for key in ("gradient_as_bucket_view", "static_graph") if key in model_options}
    reference = reference_of(other, model_options, shared)
    model = torchddp.DistributedDataParallel(one, decoupled=True, **model_options)
    inner, plain = optim(one.parameters(), **options), optim(other.parameters(), **options)
    return Pair(model, DeferredOptimizer(inner, model) if deferred else inner, reference, plain)
