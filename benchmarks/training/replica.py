"""A model that one method trains, and what this rank has sent for it."""

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
    # What forward goes through: the module, or what a method wraps around it.
    model: nn.Module
    # What steps; `inner` is the optimizer whose learning rate a schedule sets, and may be the same.
    optimizer: torch.optim.Optimizer
    inner: torch.optim.Optimizer
    # Bytes this rank has put on the wire for the step just done; None where that is not known.
    step_bytes: Callable[[], int | None]
    # What is still on its way arrives; the bytes sent for that.
    finish: Callable[[], int] = field(default=lambda: 0)
    close: Callable[[], None] = field(default=lambda: None)
    sent_bytes: int | None = 0

    def step(self, batch: Batch, lr: float) -> float:
        """A whole training step on this rank's batch; its loss."""
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
        """After the last step, before the model is judged."""
        self._count(self.finish())

    def _count(self, sent: int | None) -> None:
        self.sent_bytes = None if sent is None or self.sent_bytes is None else self.sent_bytes + sent

    def loss_on(self, batches: list[Batch]) -> float:
        """Mean loss over batches of one size, without a trace on training; not collective."""
        self.module.eval()
        with torch.no_grad():
            losses = [self.module(*batch).item() for batch in batches]
        self.module.train()
        return sum(losses) / len(losses)
