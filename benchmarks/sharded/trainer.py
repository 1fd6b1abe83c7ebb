"""A built variant: its whole training step and its tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchddp.bench.timing import start_together
from torchddp.harness.models import output_is_loss, run_forward
from torchddp.harness.variants import Variant

LEARNING_RATE = 1e-3


@dataclass
class Trainer:
    """Zeroes gradients, runs forward and backward, and updates; `bare` is the model inside `module`."""

    variant: Variant
    module: nn.Module
    bare: nn.Module
    optimizer: Any
    # Maps the module's output to the loss.
    loss: Callable[[Any], Tensor] = output_is_loss

    def step(self, batch: Any, world_size: int = 1) -> float:
        """Runs a whole training step, started by `world_size` ranks at once; returns its wall time in ms."""
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.backward(batch)
        self.update()
        return (time.perf_counter_ns() - start_ns) / 1e6

    def backward(self, batch: Any) -> None:
        """Drop the gradients and compute new ones."""
        self.zero_grad()
        self.loss(run_forward(self.module, batch)).backward()

    def zero_grad(self) -> None:
        """Drop gradients as torch's optimizers do by default."""
        self.optimizer.zero_grad()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate as a scheduler does."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def full_parameters(self) -> list[Tensor]:
        """The full parameters, detached; collective if they are sharded."""
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.bare.parameters())
        return [tensor.detach() for tensor in whole]

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates this rank's share."""
        inner: torch.optim.Optimizer = getattr(self.optimizer, "optim", self.optimizer)
        return inner

    def parameter_tensors(self) -> list[Tensor]:
        """The model's parameters, and the tensors that the optimizer updates instead."""
        updated = [p for group in self.inner_optimizer.param_groups for p in group["params"]]
        return [*self.bare.parameters(), *updated]

    def gradient_tensors(self) -> list[Tensor]:
        """All tensors that hold gradients now."""
        return [p.grad for p in self.parameter_tensors() if p.grad is not None]

    def state_tensors(self) -> list[Tensor]:
        """The optimizer's state on this rank."""
        return list(tensors_in(self.inner_optimizer.state.values()))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once; of a sharded tensor, this rank's."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
