"""A framework as torchddp.install() finds it: it imported torch's class by name long before."""

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES = {"ddp": DistributedDataParallel}
make = functools.partial(DDP, broadcast_buffers=False)


class DerivedBefore(DDP):
    """Derived before install(): keeps torch's reducer."""


def wrap(module: torch.nn.Module, ddp_class: Any = DDP, **options: Any) -> torch.nn.Module:
    return ddp_class(module, **options)


def train(model: torch.nn.Module, rank: int, steps: int = 3) -> list[torch.Tensor]:
    """Train as a framework does, including isinstance checks; return the parameters after some steps."""
    assert isinstance(model, DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(5, 8, dtype=torch.float64, generator=generator)).square().mean().backward()
        model(torch.randn(5, 8, dtype=torch.float64, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]
