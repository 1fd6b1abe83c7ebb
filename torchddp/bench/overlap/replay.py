"""A model without computation: its backward hands out gradients that were recorded before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Recorded(tuple[Tensor, ...]):
    """Gradients that all copies of a module share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorded:
        return self


class _HandOut(torch.autograd.Function):
    """All gradients at one moment: no computation is left that a reduction could hide behind."""

    @staticmethod
    def forward(ctx: Any, gradients: Recorded, *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _loss: Tensor) -> tuple[Tensor | None, ...]:
        # Copies, as a computed gradient is memory of its own, which autograd may give away.
        return None, *(gradient.clone() for gradient in ctx.gradients)


class Replay(nn.Module):
    """The trainable parameters and the buffers of a model, with the gradients they had."""

    def __init__(self, model: nn.Module, gradients: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(p.detach()) for p in model.parameters() if p.requires_grad)
        for index, buffer in enumerate(model.buffers()):
            self.register_buffer(f"buffer{index}", buffer.detach().clone())
        self.recorded = Recorded(gradient.detach().clone() for gradient in gradients)

    def forward(self) -> Tensor:
        return _HandOut.apply(self.recorded, *self.weights)
