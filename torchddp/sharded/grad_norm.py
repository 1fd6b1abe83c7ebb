"""The norm of gradients of which each rank measures its part."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchddp.transport.waits import wait_for_work


@torch.no_grad()
def sharded_norm(
    grads: Sequence[torch.Tensor],
    norm_type: float,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Collective (one all-reduce). The norm over all ranks' ``grads`` as a scalar of ``dtype`` on ``device``.

    NaN if any element is, and the same on all ranks. Raises ValueError for norms of order 0 and below.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    local = torch.nn.utils.get_total_norm(grads, norm_type)
    if group.size() == 1:
        return local.to(device=device, dtype=dtype)
    wide = torch.float32 if device.type == "mps" else torch.float64
    local = local.to(device=device, dtype=wide)
    if math.isinf(norm_type):
        # A maximum may lose a NaN, depending on the order of ranks: whether there is one travels beside it.
        both = torch.stack([local.nan_to_num(nan=0.0, posinf=math.inf), local.isnan().to(wide)])
        wait_for_work(dist.all_reduce(both, dist.ReduceOp.MAX, group=group, async_op=True), group)
        return torch.where(both[1] > 0, math.nan, both[0]).to(dtype)
    total = local.pow(norm_type)
    wait_for_work(dist.all_reduce(total, group=group, async_op=True), group)
    return total.pow(1.0 / norm_type).to(dtype)
