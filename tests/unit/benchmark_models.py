"""Valid and invalid models for `--model tests.unit.benchmark_models:NAME`."""

from typing import Any

import torch
from torch import Tensor, nn


class TwoInputs(nn.Module):
    """A model with two arguments, dropout and a frozen layer, but no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.frozen(self.head(self.dropout(self.left(left) + self.right(right))))}


def _squares(output: dict[str, Tensor]) -> Tensor:
    return output["logits"].square().mean()


def with_tuple() -> tuple[Any, ...]:
    return TwoInputs(), (torch.randn(4, 8), torch.randn(4, 8)), _squares


def with_dict() -> tuple[Any, ...]:
    return TwoInputs(), {"left": torch.randn(4, 8), "right": torch.randn(4, 8)}


def with_generator() -> tuple[Any, ...]:
    return nn.Linear(8, 2), lambda generator: torch.randn(4, 8, generator=generator)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def unused() -> tuple[Any, ...]:
    return HalfUsed(), torch.randn(4, 8)


class NotAveraging(nn.Module):
    """A wrapper that forgets to communicate."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
