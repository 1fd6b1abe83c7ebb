"""A model trained by one method, and the bytes that this rank has sent for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from examples.gpt.data import Batch

MAX_GRADIENT_NORM = 1.0


@dataclass
class Replica:
    """This rank's copy. Every method is collective: all ranks of the method's group call it together."""

    module: nn.Module
    # Runs forward: the module, or a method's wrapper around it.
    model: nn.Module
    # Runs the step; `inner` is the optimizer whose learning rate a schedule sets, and may be the same.
    optimizer: torch.optim.Optimizer
    inner: torch.optim.Optimizer
    # Bytes that this rank has sent for the last step; None if unknown.
    step_bytes: Callable[[], int | None]
    # Completes transfers still in flight; returns the bytes sent for them.
    finish: Callable[[], int] = field(default=lambda: 0)
    close: Callable[[], None] = field(default=lambda: None)
    sent_bytes: int | None = 0

    def step(self, batch: Batch, lr: float) -> float:
        """Runs a whole training step on this rank's batch; returns its loss."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.zero_grad()
        loss: torch.Tensor = self.model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        self._count(self.step_bytes())
        return loss.item()

    def end(self) -> None:
        """Call it after the last step, before the model is evaluated."""
        self._count(self.finish())

    def _count(self, sent: int | None) -> None:
        self.sent_bytes = None if sent is None or self.sent_bytes is None else self.sent_bytes + sent

    def loss_on(self, batches: list[Batch]) -> float:
        """Mean loss over batches of one size, without affecting training; not collective."""
        self.module.eval()
        with torch.no_grad():
            losses = [self.module(*batch).item() for batch in batches]
        self.module.train()
        return sum(losses) / len(losses)
