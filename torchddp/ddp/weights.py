"""The weight of a backward in the mean over ranks: samples, tokens, or anything else."""

from __future__ import annotations

import math
from typing import Literal, SupportsFloat, get_args

import torch

LossKind = Literal["mean", "sum"]
LOSSES = get_args(LossKind)


def weight_and_count(weight: SupportsFloat | torch.Tensor, loss: LossKind, rank: int) -> tuple[float, float]:
    """The factor for a backward's gradients, and what the backward adds to the divisor of all ranks' sum.

    TypeError or ValueError for a weight that is no number (or tensor of one), negative or not finite; other losses.
    """
    if loss not in LOSSES:
        raise ValueError(f'loss must be "mean" or "sum", as it combines samples or tokens, got {loss!r}')
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise TypeError(
                f"the weight on rank {rank} must be a number or a one-element tensor, got a {weight.dtype} tensor "
                f"of shape {tuple(weight.shape)}"
            )
        weight = weight.item()
    try:
        if isinstance(weight, str | bytes):
            raise TypeError
        count = float(weight)
    except (TypeError, ValueError):
        raise TypeError(f"the weight on rank {rank} must be a number or a one-element tensor, got {weight!r}") from None
    if not math.isfinite(count) or count < 0:
        raise ValueError(f"the weight on rank {rank} must be 0 or more, and finite, got {weight!r}")
    return (count if loss == "mean" else float(count > 0)), count
