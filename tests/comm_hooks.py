"""A model whose gradients are given, so that what a communication hook should make of them is known in closed form."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchddp
from tests.models import same_on_all_ranks
from torchddp.comm_hooks import CommHook

SHAPES = {"embed": (40, 30), "norm": (30,), "wide": (24, 3, 9), "bias": (50,), "narrow": (40, 30), "long": (2500,)}
# About three buckets of these.
CAP_MB = 0.008

Gradients = dict[str, Tensor]


class Given(nn.Module):
    """``forward(gradients)`` is a sum whose gradients are those."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Gradients) -> Tensor:
        return sum((getattr(self, name) * value).sum() for name, value in gradients.items())


def given(rank: int, step: int, shapes: dict[str, tuple[int, ...]] | None = None) -> Gradients:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in (shapes or SHAPES).items()}


def average(step: int, make: Callable[[int, int], Gradients] = given) -> Gradients:
    """Over all ranks, in fp64."""
    all_of_them = [make(rank, step) for rank in range(dist.get_world_size())]
    return {name: sum(g[name].double() for g in all_of_them) / len(all_of_them) for name in all_of_them[0]}


def live_on(hosts: str | None, rank: int) -> None:
    if hosts is not None:
        os.environ["TORCHDDP_HOST_ID"] = hosts[rank]


def hooked(hook: CommHook, module: nn.Module | None = None, **options: Any) -> torchddp.DistributedDataParallel:
    """Collective."""
    module = module or Given()
    model = torchddp.DistributedDataParallel(module, **{"bucket_cap_mb": CAP_MB, **options})
    model.register_comm_hook(None, hook)
    return model


def step_of(model: nn.Module, gradients: Gradients) -> Gradients:
    """One backward; the averages that came of it, in fp64, the same on all ranks."""
    model.zero_grad()
    model(gradients).backward()
    grads = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    assert same_on_all_ranks([_bits(grad) for grad in grads.values()])
    return {name: grad.double() for name, grad in grads.items()}


def _bits(value: Tensor) -> Tensor:
    """NaN is equal to itself here."""
    return value.contiguous().view(torch.int16 if value.element_size() == 2 else torch.int32)


def sum_over_ranks(tensors: Gradients) -> Gradients:
    """Collective."""
    sums = {name: value.double() for name, value in tensors.items()}
    for name in sorted(sums):
        dist.all_reduce(sums[name])
    return sums


def left_out(hook: CommHook) -> Gradients:
    """Collective: all that the ranks hold back, as part of the average."""
    state = hook.state_dict()
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for kind in ("residual", "server_residual"):
        for name, value in sum_over_ranks(state.get(kind, {})).items():
            total[name] += value
    return total


def assert_near(mine: Gradients, theirs: Gradients, rtol: float, what: str = "") -> None:
    """Relative to each tensor's norm."""
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        error = (value.double() - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-30)
        assert error <= rtol, f"{what} {name}: off by {error:.3g}, {rtol:.3g} allowed"


def assert_equal(mine: Gradients, theirs: Gradients) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
