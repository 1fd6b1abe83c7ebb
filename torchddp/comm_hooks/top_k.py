"""Only the largest gradients: top-k sparsification."""

from __future__ import annotations

import datetime

import torch
from torch import Tensor

from torchddp.comm_hooks import formats
from torchddp.comm_hooks.layout import Layout
from torchddp.comm_hooks.quantized import FlatHook

__all__ = ["TopK"]


class TopK(FlatHook):
    """Sends the gradients of largest magnitude of each bucket (Aji and Heafield, EMNLP 2017; with error feedback:
    Stich et al., NeurIPS 2018). The others wait in the residual until they are large enough.

    Each rank sends ``8 * k`` bytes a bucket (place and value) to every other: this pays where there are few hosts.
    Holds fp32 residuals of the gradients' size.

    Args:
        ratio: of a bucket's elements; at least one is sent.
        k: their number, instead.

    Raises:
        ValueError: a ratio outside (0, 1], or both ``ratio`` and ``k``.
    """

    def __init__(
        self,
        ratio: float | None = None,
        k: int | None = None,
        error_feedback: bool = True,
        *,
        hierarchical: bool | str = "auto",
        timeout: datetime.timedelta | None = None,
    ) -> None:
        super().__init__(error_feedback=error_feedback, hierarchical=hierarchical, timeout=timeout)
        if ratio is not None and k is not None:
            raise ValueError(f"give ratio or k, not both (got ratio={ratio}, k={k})")
        if k is not None and k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        self.ratio = 0.01 if ratio is None else ratio
        self.k = k
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, got {ratio}")

    def _average_(self, shard: Tensor, residual: Tensor | None, layout: Layout, begin: int) -> None:
        exchange = self._exchange
        scale = 1 / exchange.world_size
        if exchange.members == 1:
            shard.mul_(scale)
            return
        numel = shard.numel()
        count = min(numel, self.k if self.k is not None else max(1, round(self.ratio * numel)))
        message = torch.empty(8 * count, dtype=torch.uint8, device=shard.device)
        places, values = _places_and_values(message)
        formats.select_top_k(shard, count, places, values, residual, scale)
        shard.zero_()
        for theirs in exchange.gather(message).unbind():  # in rank order: the same sums everywhere
            places, values = _places_and_values(theirs)
            shard.index_add_(0, places, values)


def _places_and_values(message: Tensor) -> tuple[Tensor, Tensor]:
    half = message.numel() // 2
    return message[:half].view(torch.int32), message[half:].view(torch.float32)
