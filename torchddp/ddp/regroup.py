"""Moving a DistributedDataParallel to another process group, when ranks leave, die, or join."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torchddp import _torch
from torchddp.ddp.hooks import hooks_that_follow
from torchddp.ddp.wrapper import Wrapper
from torchddp.transport.agreement import backend_of


def update_process_group(ddp: Wrapper, new_group: dist.ProcessGroup) -> None:
    """See `DistributedDataParallel.update_process_group`. Collective among the group's ranks."""
    session = ddp.session
    if _torch.rank_not_in_group(new_group):
        ddp.observers.close()
        _forget_steps(ddp)
        session.is_in_group = False  # no step can be reduced until it gets a group that contains this rank
        return
    _check_group(new_group, session.device)
    following = hooks_that_follow(
        ddp._comm_hooks, ddp._builtin_hook is not None, session.rank, session.process_group, new_group
    )
    _forget_steps(ddp)
    session.rebind(new_group)
    ddp.process_group = new_group
    ddp.observers.on_group_change()
    ddp.logger.rebind(new_group)
    for hook in following:
        hook.rebind(ddp)


def _forget_steps(ddp: Wrapper) -> None:
    # torch's own method does this too, but would leave the reducer on the old transport.
    ddp._has_rebuilt_buckets = False
    ddp.reducer.reset_state()
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False


def _check_group(group: object, device: torch.device) -> None:
    """TypeError, RuntimeError or ValueError for a group that can't reduce a model on this device."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"update_process_group takes a process group, got {type(group).__name__}")
    if type(group) is not dist.ProcessGroup:  # written in Python (torchft's, for instance): trust it
        return
    if not _torch.is_alive(group) and _name_of(group):
        raise RuntimeError(f"the process group {_name_of(group)!r} was destroyed: make a new one")
    if backend_of(group, device.type) is None:
        kinds = ", ".join(sorted({d.type for d in group._device_types})) or "none"
        raise ValueError(
            f"the process group has no backend for {device.type} tensors, and the model is on {device}: it only has "
            f"one for {kinds}. Create it with a backend for {device.type}"
        )


def _name_of(group: dist.ProcessGroup) -> str:
    try:
        return str(group.group_name)
    except RuntimeError:
        return ""  # torch did not create it, so it never had one
