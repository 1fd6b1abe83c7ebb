"""A model whose steps are weighted, for the benchmark."""

from __future__ import annotations

from typing import Any

from torchddp import DistributedDataParallel


class Weighted(DistributedDataParallel):
    """Calls `weigh()` in every step.

    All ranks use the same weight, so gradients are plain averages. The weight changes every step, so the divisor is
    known only after the ranks have summed their weights.
    """

    _weight = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._weight = self._weight % 1000 + 1
        self.weigh(self._weight)
        return super().forward(*inputs, **kwargs)
