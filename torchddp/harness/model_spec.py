"""What a model needs to be timed: itself, a batch, and what to differentiate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def output_is_loss(output: Any) -> Tensor:
    """For a module that returns its loss."""
    loss: Tensor = output
    return loss


@dataclass(frozen=True)
class ModelSpec:
    """How to build a model and one batch for it, and what to differentiate."""

    title: str
    build: Callable[[], nn.Module]
    # A tensor, or a tuple or dict of arguments for the module.
    make_batch: Callable[[torch.Generator], Any]
    # Of the module's output; the built-in models return their loss.
    loss: Callable[[Any], Tensor] = output_is_loss
    # Whether ranks get different batches. Where not, their gradients are equal, and averaging them shows nothing.
    batches_differ: bool = True


def run_forward(module: nn.Module, batch: Any) -> Any:
    """The module's output for a batch: a tensor, or a tuple or dict of its arguments."""
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def default_loss(output: Any) -> Tensor:
    """A scalar to differentiate: `output.loss`, `output["loss"]`, or the mean of the (first) tensor."""
    if isinstance(output, dict) and "loss" in output:
        output = output["loss"]
    output = getattr(output, "loss", output)
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        output = next((item for item in output if isinstance(item, Tensor) and item.requires_grad), None)
    if not isinstance(output, Tensor):
        raise TypeError(f"found no tensor to differentiate in the model's output, a {type(output).__name__}")
    return output if output.dim() == 0 else output.float().mean()
