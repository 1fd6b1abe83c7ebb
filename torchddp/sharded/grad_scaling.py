"""What GradScaler leaves to the optimizer: whether a step is skipped, and the division by the scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchddp.transport.waits import wait_for_work


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler for optimizers whose gradients are sharded over ranks (`torchddp.ShardedDataParallel`).

    What one rank finds in its gradients, all ranks find: they skip the same steps, and their scales stay equal.
    ``unscale_`` and the first ``step`` after a backward are collective. Optimizers other than `OSS` are treated as by
    torch's class.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        group = getattr(optimizer, "process_group", None)
        if group is None or group.size() == 1:
            return found
        # A rank that owns nothing has no entry.
        anywhere = sum((flag.to(found_inf.device) for flag in found.values()), torch.zeros_like(found_inf))
        wait_for_work(dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group, async_op=True), group)
        return {found_inf.device: anywhere}


def agree_on_inf(
    found_inf: torch.Tensor, group: dist.ProcessGroup, device: torch.device, *, sharded: bool = False
) -> bool:
    """Collective. Whether this step is to be skipped, the same answer on all ranks.

    Raises RuntimeError on every rank if only some found values that are not finite: their scales would part as well.
    """
    mine = bool(found_inf.item())
    if group.size() == 1:
        return mine
    flags = torch.zeros(group.size(), device=device)
    flags[group.rank()] = float(mine)
    wait_for_work(dist.all_reduce(flags, group=group, async_op=True), group)
    ranks = [rank for rank, flag in enumerate(flags.tolist()) if flag]
    if 0 < len(ranks) < group.size():
        why = (
            "each rank looks at its own gradients only; use torchddp.optim.ShardedGradScaler with ShardedDataParallel"
            if sharded
            else "the gradients were not averaged (a step after no_sync()?) or changed on one rank"
        )
        raise RuntimeError(
            f"GradScaler found gradients that are not finite on rank {', '.join(map(str, ranks))} only, of "
            f"{group.size()} ranks: {why}."
        )
    return mine


@torch.no_grad()
def unscale(grads: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Divides in place by ``scale``, with the arithmetic of GradScaler.unscale_."""
    inverse = scale.double().reciprocal().float()
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        by_kind[grad.device, grad.dtype].append(grad)
    for (device, _), alike in by_kind.items():
        known_to_be_finite = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, known_to_be_finite, inverse.to(device))
