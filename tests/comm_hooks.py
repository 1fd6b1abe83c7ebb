"""A model with given gradients, for which the expected result of a communication hook has a closed form."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchddp
from tests.models import same_on_all_ranks
from torchddp.comm_hooks import CommHook

SHAPES = {"embed": (40, 30), "norm": (30,), "wide": (24, 3, 9), "bias": (50,), "narrow": (40, 30), "long": (2500,)}
# About three buckets.
CAP_MB = 0.008

Gradients = dict[str, Tensor]


class Given(nn.Module):
    """``forward(gradients)`` returns a sum that has those gradients."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Gradients) -> Tensor:
        return sum((getattr(self, name) * value).sum() for name, value in gradients.items())


def given(rank: int, step: int) -> Gradients:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def average(step: int, make: Callable[[int, int], Gradients] = given, ranks: Sequence[int] | None = None) -> Gradients:
    """The average over these ranks, by default all, in fp64."""
    found = [make(rank, step) for rank in ranks or range(dist.get_world_size())]
    return {name: sum(gradients[name].double() for gradients in found) / len(found) for name in found[0]}


def live_on(hosts: str | None, rank: int) -> None:
    if hosts is not None:
        os.environ["TORCHDDP_HOST_ID"] = hosts[rank]


def hooked(hook: CommHook, module: nn.Module | None = None, **options: Any) -> torchddp.DistributedDataParallel:
    """Wrap the module with the hook (collective)."""
    module = module or Given()
    model = torchddp.DistributedDataParallel(module, **{"bucket_cap_mb": CAP_MB, **options})
    model.register_comm_hook(None, hook)
    return model


def step_of(model: nn.Module, gradients: Gradients) -> Gradients:
    """Run one backward; return the averages in fp64 (checked to be equal on all ranks if all take part)."""
    model.zero_grad()
    model(gradients).backward()
    grads = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    if model.process_group.size() == dist.get_world_size():
        # In bytes, in which NaN equals itself.
        assert same_on_all_ranks(grad.contiguous().view(torch.uint8) for grad in grads.values())
    return {name: grad.double() for name, grad in grads.items()}


def assert_near(mine: Gradients, theirs: Gradients, rtol: float, what: str = "") -> None:
    """The error is relative to each tensor's norm."""
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        error = (value.double() - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-30)
        assert error <= rtol, f"{what} {name}: off by {error:.3g}, {rtol:.3g} allowed"


def assert_equal(mine: Gradients, theirs: Gradients) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
