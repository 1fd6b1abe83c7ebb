"""Orthonormal columns of any matrix."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["orthonormal"]


def orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span at least those of ``matrices``: fp32 [..., n, r], n >= r, finite -> the same shape.

    By Householder reflections in fp64, which need no division by a norm that may be zero: columns that depend on
    others, or are zero, get directions of their own instead of NaN. Columns are scaled first, so that tiny ones count.
    """
    wide = matrices.double()
    peak = wide.abs().amax(-2, keepdim=True)
    wide = wide / peak.masked_fill(peak == 0, 1.0)
    return torch.linalg.qr(wide).Q.float()
