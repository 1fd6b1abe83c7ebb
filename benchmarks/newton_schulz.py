"""The Newton-Schulz iteration of torch.optim.Muon, in a chosen dtype and for FSDP2's sharded gradients."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import _muon


def use(dtype: torch.dtype) -> None:
    """Let torch.optim.Muon in this process compute in `dtype`; torch's own is bfloat16."""
    _muon._zeropower_via_newtonschulz = partial(orthogonalized, dtype=dtype)


@contextlib.contextmanager
def deepspeeds() -> Iterator[None]:
    """torch.optim.Muon in this process computes as DeepSpeed's does, with fewer multiplications."""
    gram: Any = importlib.import_module("deepspeed.runtime.zero.muon.original_muon").zeropower_via_gram_newtonschulz

    def by_gram(grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
        found: Tensor = gram(grad, ns_steps)
        return found

    own, _muon._zeropower_via_newtonschulz = _muon._zeropower_via_newtonschulz, by_gram
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = own


def orthogonalized(
    gradient: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, *, dtype: torch.dtype
) -> Tensor:
    """As torch's function. Of a sharded matrix, each rank gathers and computes the whole, and keeps its own rows."""
    if isinstance(gradient, DTensor):
        whole = orthogonalized(gradient.full_tensor(), coefficients, steps, eps, dtype=dtype)
        replicated = DTensor.from_local(whole, gradient.device_mesh, run_check=False)
        return replicated.redistribute(placements=gradient.placements)
    a, b, c = coefficients
    tall = gradient.size(0) > gradient.size(1)
    x = (gradient.T if tall else gradient).to(dtype, copy=True)
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
