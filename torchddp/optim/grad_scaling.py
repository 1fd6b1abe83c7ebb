"""What GradScaler leaves to the optimizer: whether a step is skipped, and the division by the scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist


def agree_on_inf(found_inf: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Collective. Whether this step is to be skipped, the same answer on all ranks.

    Raises RuntimeError on every rank if only some found values that are not finite: their scales would part as well.
    """
    mine = bool(found_inf.item())
    if group.size() == 1:
        return mine
    flags = torch.zeros(group.size(), device=device)
    flags[group.rank()] = float(mine)
    dist.all_reduce(flags, group=group)
    ranks = [rank for rank, flag in enumerate(flags.tolist()) if flag]
    if 0 < len(ranks) < group.size():
        raise RuntimeError(
            f"GradScaler found gradients that are not finite on rank {', '.join(map(str, ranks))} only, of "
            f"{group.size()} ranks: the gradients were not averaged (a step after no_sync()?) or changed on one rank."
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
