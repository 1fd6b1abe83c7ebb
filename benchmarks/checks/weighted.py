"""A model whose steps are weighted, for the benchmark."""

from __future__ import annotations

from typing import Any

from torchddp import DistributedDataParallel


class Weighted(DistributedDataParallel):
    """Every rank has the same weight, so gradients are the plain averages; but another in each step, so that what the
    sum is divided by is known only once the ranks have added their weights up."""

    _weight = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._weight = self._weight % 1000 + 1
        self.weigh(self._weight)
        return super().forward(*inputs, **kwargs)
