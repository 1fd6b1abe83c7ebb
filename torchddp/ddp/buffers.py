"""When and how a model's buffers are synchronized around forward.

Behaves as in torch but is faster: torch looks up ``buffer_hook`` several times per forward, and on a model without it
each lookup raises inside nn.Module, which takes longer than everything else here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C, _torch
from torchddp.ddp.model import buffers_of


def _has_hook(ddp: Any) -> bool:
    return "buffer_hook" in ddp.__dict__


def wanted_before_forward(ddp: Any) -> bool:
    """Whether `sync` must be called before forward."""
    return bool(TorchDDP._check_sync_bufs_pre_fwd(ddp) if _has_hook(ddp) else ddp.will_sync_module_buffers())


def wanted_after_forward(ddp: Any) -> bool:
    """Whether `sync` must be called after forward."""
    return _has_hook(ddp) and bool(TorchDDP._check_sync_bufs_post_fwd(ddp))


def sync(ddp: Any) -> None:
    """Send one rank's buffers to all others, or call the model's buffer hook. Collective."""
    # Same order as torch: under join(), all ranks first agree on whose buffers are authoritative.
    root = ddp._find_common_rank(ddp._distributed_rank, True) if ddp._join_config.enable else 0
    if ddp.parameters_to_ignore or _has_hook(ddp):
        ddp._assign_modules_buffers()  # with names, using torch's slower traversal
    else:
        # Buffers may have been reassigned. Bypasses nn.Module.__setattr__, which is slow.
        ddp.__dict__["modules_buffers"] = buffers_of(ddp.module)
    if not _has_hook(ddp):
        ddp._default_broadcast_coalesced(authoritative_rank=root)
        return
    # An in-place update must not invalidate the backward of an earlier forward (two forwards, then a backward). Our own
    # broadcast does not bump version counters.
    with torch.no_grad(), _torch.keep_versions(tuple(ddp.modules_buffers)):
        ddp._sync_module_buffers(root)


def broadcast(ddp: Any, buffers: list[torch.Tensor], root: int) -> bool:
    """Broadcast the buffers. Return False, leaving them to torch, if they can't be sent as bytes. Collective."""
    if ddp.process_group.size() > 1 and buffers:
        if not _C.can_travel_as_bytes(buffers):
            return False
        ddp.session.sync_buffers(buffers, root)
    return True
