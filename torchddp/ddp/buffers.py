"""When the model's buffers are brought to all ranks, around forward, and how.

As torch's, but for one thing: looking for an attribute that is not there makes nn.Module raise an error, which takes
longer than the rest. torch looks for ``buffer_hook`` several times in each forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C
from torchddp.ddp.model import buffers_of


def _has_hook(ddp: Any) -> bool:
    return "buffer_hook" in ddp.__dict__


def wanted_before_forward(ddp: Any) -> bool:
    """Whether `sync` is to be called then."""
    return bool(TorchDDP._check_sync_bufs_pre_fwd(ddp) if _has_hook(ddp) else ddp.will_sync_module_buffers())


def wanted_after_forward(ddp: Any) -> bool:
    """Whether `sync` is to be called then."""
    return _has_hook(ddp) and bool(TorchDDP._check_sync_bufs_post_fwd(ddp))


def sync(ddp: Any) -> None:
    """All buffers of one rank to all others, or what the model's hook for buffers does. Collective."""
    # The order of torch's own: under join() all ranks first agree on who is authoritative.
    root = ddp._find_common_rank(ddp._distributed_rank, True) if ddp._join_config.enable else 0
    if ddp.parameters_to_ignore or _has_hook(ddp):
        ddp._assign_modules_buffers()  # with names, by torch's slower walk
    else:
        # Buffers may have been reassigned. Past nn.Module, which would ask whether the list is a parameter.
        ddp.__dict__["modules_buffers"] = buffers_of(ddp.module)
    if not _has_hook(ddp):
        ddp._default_broadcast_coalesced(authoritative_rank=root)
        return
    # In-place updates must not make autograd refuse a backward through an earlier forward (two forwards, one backward).
    # Our own broadcast moves no version counter.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(ddp.modules_buffers)):
        ddp._sync_module_buffers(root)


def broadcast(ddp: Any, buffers: list[torch.Tensor], root: int) -> bool:
    """Whether that was done here: buffers that are not plain memory are left to torch."""
    if ddp.process_group.size() > 1 and buffers:
        if not _C.can_travel_as_bytes(buffers):
            return False
        ddp.session.sync_buffers(buffers, root)
    return True
