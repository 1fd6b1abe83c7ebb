"""16-bit models, and the expected fp32 gradients after accumulation over microbatches and ranks."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torchddp
from torchddp import Precision

HALVES = [torch.bfloat16, torch.float16]
MICRO = 3


def layers(dtype: torch.dtype) -> nn.Module:
    """Layers of which one has a gradient large enough for its own bucket."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 1700), nn.Tanh(), nn.Linear(1700, 7)).to(dtype)


def loss(model: nn.Module, rank: int, step: int, micro: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(100 * step + 10 * micro + rank)
    return model(torch.randn(5, 30).to(dtype)).square().sum()


def sums(model: nn.Module, world_size: int, micro: int, run: Callable[[nn.Module, int, int], Any]) -> list[Tensor]:
    """Sum autograd's gradients in this process, over microbatches and then ranks, in fp32 (or fp64)."""

    def zeros() -> list[Tensor]:
        return [torch.zeros(p.shape, dtype=max(p.dtype, torch.float32, key=lambda d: d.itemsize)) for p in parameters]

    parameters = list(model.parameters())
    total = zeros()
    for rank in range(world_size):
        mine = zeros()
        for i in range(micro):
            model.zero_grad()
            run(model, rank, i)
            for t, p in zip(mine, parameters, strict=True):
                t += 0 if p.grad is None else p.grad
        for t, m in zip(total, mine, strict=True):
            t += m * (1 / world_size)
    return total


@functools.cache
def expected(world_size: int, step: int, dtype: torch.dtype, micro: int = MICRO) -> list[Tensor]:
    """The expected gradients of the model that `layers` makes."""
    return sums(layers(dtype), world_size, micro, lambda model, r, i: loss(model, r, step, i, dtype).backward())


def run_step(ddp: Any, rank: int, step: int, dtype: torch.dtype, micro: int = MICRO) -> None:
    for i in range(micro):
        with ddp.no_sync() if i < micro - 1 else contextlib.nullcontext():
            loss(ddp, rank, step, i, dtype).backward()


def grad_of(p: Any) -> Any:
    """The fp32 gradient, in `main_grad` or `grad`."""
    return p.grad if getattr(p, "main_grad", None) is None else p.main_grad


def kept(ddp: nn.Module) -> list[Tensor]:
    found = [grad_of(p) for p in ddp.parameters()]
    assert all(g.dtype == torch.float32 for g in found), [g.dtype for g in found]
    return found


def wrapped(
    module: nn.Module,
    cls: type = torchddp.DistributedDataParallel,
    *,
    main_grads_as: Any = "main_grad",
    wire: torch.dtype | None = None,
    **options: Any,
) -> Any:
    precision = Precision(main_grads=torch.float32, main_grads_as=main_grads_as, wire=wire)
    return cls(module, precision=precision, **options)
