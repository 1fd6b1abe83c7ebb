"""Sharded gradients: their norm, and what GradScaler leaves to the optimizer."""

from __future__ import annotations

import itertools
import math
import sys
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchddp import _torch
from torchddp.transport.agreement import Agreement, GroupExchange, in_words
from torchddp.transport.waits import run_collective

_DIGESTS = 2**24  # numbers that are exact in float32
_REFUSED = 2  # a GradScaler, by this rank's gradients
_NO_GRADIENTS = -1  # which a GradScaler has found on this rank
_NEAR_FRAMES = 8  # between OSS.step and its caller there are torch's wrappers of step


@torch.no_grad()
def sharded_norm(
    grads: Sequence[torch.Tensor],
    norm_type: float,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    check: Callable[[], None],
    alike: Mapping[str, Any],
) -> torch.Tensor:
    """The norm of all ranks' ``grads``: a scalar of ``dtype`` on ``device``. Collective (one all-gather).

    ValueError for norms of order 0 and below, and if the options ``alike`` differ between ranks.
    """
    problem: Exception | None = None
    local, order = torch.zeros((), device=device), 1.0
    try:
        order = float(norm_type)
        if not order > 0:
            raise ValueError(f"norm_type must be above 0, got {norm_type}")
        check()
        local = torch.nn.utils.get_total_norm(grads, order)
    except (RuntimeError, TypeError, ValueError) as error:
        if group.size() == 1:
            raise
        problem = error
    if group.size() == 1:
        return local.to(device=device, dtype=dtype)
    words = {name: in_words(value) for name, value in {"norm_type": norm_type, **alike}.items()}
    digest = zlib.crc32(repr(words).encode()) % _DIGESTS
    wide = torch.float32 if device.type == "mps" else torch.float64
    own = torch.stack([local.to(device=device, dtype=wide), torch.tensor(digest, dtype=wide, device=device)])
    if problem is not None:
        own[1] = -1
    by_rank = torch.empty(group.size(), 2, dtype=wide, device=device)
    run_collective(
        lambda: dist.all_gather(list(by_rank), own, group=group, async_op=True),
        group,
        "a norm over sharded gradients",
    )
    if bool((by_rank[:, 1] != digest).any()):
        with Agreement("clip_grad_norm()", group) as agreement:
            if problem is not None:
                raise problem
            agreement.verify(options=words)
    norms = by_rank[:, 0]
    return (norms.max() if math.isinf(order) else norms.pow(order).sum().pow(1.0 / order)).to(dtype)


def refuse_local_sgd() -> None:
    """RuntimeError inside a step of torch's PostLocalSGDOptimizer, whose ranks have gradients of their own."""
    module = sys.modules.get("torch.distributed.optim.post_localSGD_optimizer")
    callers = itertools.islice(traceback.walk_stack(sys._getframe()), _NEAR_FRAMES) if module is not None else ()
    if any(frame.f_code.co_filename == module.__file__ for frame, _ in callers):  # type: ignore[union-attr]
        raise ValueError("PostLocalSGDOptimizer can't wrap OSS, whose steps are collective: here, ranks step alone")


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler for optimizers whose gradients are sharded over ranks (`torchddp.ShardedDataParallel`).

    An inf or NaN in one rank's gradients counts on all ranks: they skip the same steps, and their scales stay equal.
    ``unscale_`` and the first ``step`` after a backward are collective. For optimizers other than `OSS`, as in torch.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        group: dist.ProcessGroup | None = getattr(optimizer, "process_group", None)
        if group is None or group.size() == 1:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # A rank that owns nothing has no entry.
        anywhere = torch.zeros_like(found_inf)
        try:
            for flag in super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16).values():
                anywhere = torch.maximum(anywhere, flag.to(found_inf.device))
        except ValueError:  # for fp16 gradients, which this rank has and others may not
            anywhere.fill_(_REFUSED)
        run_collective(
            lambda: dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group, async_op=True),
            group,
            "looking for infinite gradients",
        )
        if not allow_fp16 and bool(anywhere == _REFUSED):
            raise ValueError("Attempting to unscale FP16 gradients: keep parameters in float32, and use autocast.")
        return {found_inf.device: anywhere}


@torch.no_grad()
def skips_step(optimizer: Optimizer, params: Sequence[torch.Tensor], group: dist.ProcessGroup, sharded: bool) -> bool:
    """Whether all ranks skip this step because of non-finite gradients. Collective under a GradScaler.

    If not, unscales gradients that the scaler has left to this optimizer (``_step_supports_amp_scaling``). ``sharded``:
    each rank sees only its own gradients. RuntimeError on every rank if only some found non-finite values.
    """
    found_inf: torch.Tensor | int | None = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return False
    found = int(found_inf > 0) if isinstance(found_inf, torch.Tensor) else _NO_GRADIENTS
    if _agree_on_inf(found, group, sharded):
        return True
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        inverse = scale.double().reciprocal().float()  # same arithmetic as GradScaler.unscale_
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for grad in (param.grad for param in params if param.grad is not None):
            by_kind[grad.device, grad.dtype].append(grad)
        for (device, _), alike in by_kind.items():
            known_to_be_finite = torch.zeros((), device=device)
            _torch.amp_unscale_(alike, known_to_be_finite, inverse.to(device))
    return False


def _agree_on_inf(mine: int, group: dist.ProcessGroup, sharded: bool) -> bool:
    if group.size() == 1:
        return mine == 1
    by_rank = GroupExchange(group).gather_integer(mine)
    for value, what in ((1, "non-finite gradients"), (_NO_GRADIENTS, "no gradients")):
        ranks = [rank for rank, found in enumerate(by_rank) if found == value]
        if 0 < len(ranks) < group.size():
            why = (
                "each rank checks only its own gradients; use torchddp.optim.ShardedGradScaler with ShardedDataParallel"
                if sharded
                else "the gradients were not averaged (a step after no_sync()?) or were changed on one rank"
            )
            found_on = f"on rank {', '.join(map(str, ranks))} only, of {group.size()} ranks"
            raise RuntimeError(f"GradScaler found {what} {found_on}: {why}.")
    return mine == 1
