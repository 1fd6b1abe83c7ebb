"""Shared by the weigh() of each framework: finding the wrapper, and undoing the framework's division of the loss."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torchddp.ddp.module import DistributedDataParallel
from torchddp.ddp.weights import LossKind, weight_and_count
from torchddp.sync.microbatches import unwrapped


def wrapper_of(model: torch.nn.Module, alone: bool, how: str) -> DistributedDataParallel | None:
    """torchddp's class around the model, compiled or not. None: it has no wrapper, and the process is ``alone``.

    RuntimeError if another class averages gradients, or the model isn't the wrapped one. ``how``: what to do about it.
    """
    wrapper = unwrapped(model)
    if isinstance(wrapper, DistributedDataParallel):
        return wrapper
    if alone and not isinstance(wrapper, TorchDDP):
        return None
    raise RuntimeError(
        f"only torchddp's classes can weight gradients, and this model is a {torch.typename(wrapper)}: {how}"
    )


def weigh(wrapper: DistributedDataParallel, weight: float | torch.Tensor, loss: LossKind, divided_by: float) -> None:
    """`DistributedDataParallel.weigh` for a loss that the program divides by ``divided_by`` before the backward."""
    factor, count = weight_and_count(weight, loss, wrapper.session.rank)
    wrapper._weigh(factor * divided_by, count)
