"""A variant that is built: its whole training step, and what it holds."""

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
    """Zero the gradients, forward, backward, update; `bare` is the model inside of `module`."""

    variant: Variant
    module: nn.Module
    bare: nn.Module
    optimizer: Any
    # Of the module's output.
    loss: Callable[[Any], Tensor] = output_is_loss

    def step(self, batch: Any, world_size: int = 1) -> float:
        """A whole training step, begun by `world_size` ranks at once; its wall time in ms."""
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.backward(batch)
        self.update()
        return (time.perf_counter_ns() - start_ns) / 1e6

    def backward(self, batch: Any) -> None:
        """Drop the gradients, make new ones."""
        self.zero_grad()
        self.loss(run_forward(self.module, batch)).backward()

    def zero_grad(self) -> None:
        """As torch's optimizers do it by default."""
        self.optimizer.zero_grad()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def set_learning_rate(self, rate: float) -> None:
        """As a scheduler does."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def full_parameters(self) -> list[Tensor]:
        """Whole parameters, detached; collective where they are sharded."""
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.bare.parameters())
        return [tensor.detach() for tensor in whole]

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The one that updates this rank's share."""
        inner: torch.optim.Optimizer = getattr(self.optimizer, "optim", self.optimizer)
        return inner

    def parameter_tensors(self) -> list[Tensor]:
        """Of the model, and what the optimizer updates in their place."""
        updated = [p for group in self.inner_optimizer.param_groups for p in group["params"]]
        return [*self.bare.parameters(), *updated]

    def gradient_tensors(self) -> list[Tensor]:
        """All that hold gradients now."""
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
