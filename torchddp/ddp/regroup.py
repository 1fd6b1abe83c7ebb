"""A DistributedDataParallel that goes on over another process group: ranks leave, die, or join."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _rank_not_in_group, _world

from torchddp.ddp.hooks import hooks_that_follow
from torchddp.transport.agreement import backend_of


def update_process_group(ddp: Any, new_group: dist.ProcessGroup) -> None:
    """Go on over another process group. Collective among its ranks, each of which has this model wrapped.

    Between steps, or after a step that failed: then clear the gradients, which may be averaged in part. The ranks agree
    on buckets, shared memory is attached anew, hooks of ``torchddp.comm_hooks`` follow with what they hold back,
    ``static_graph`` records again, ``bucket_cap_mb="auto"`` plans again. Parameters, buffers and the optimizer's state
    stay as they are on each rank: see ``sync_module_states``. A rank that is not in the group calls this as well, or
    not; its model can't be trained until it gets a group that it is in.

    Raises:
        TypeError: what is no process group.
        ValueError: a group without a backend for the model's device; ranks with different transports.
        RuntimeError: a group that was destroyed; models that differ between its ranks (names the parameters and ranks);
            a communication hook that can't follow. The model keeps the group it had.
        TransportError: a rank of the group has died, or did not come in time.
    """
    session = ddp.session
    if _rank_not_in_group(new_group):
        ddp.observers.close()
        _forget_steps(ddp)
        session.leave_group()
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


def _forget_steps(ddp: Any) -> None:
    # As torch's own does, whose reducer would not know the new transport.
    ddp._has_rebuilt_buckets = False
    ddp.reducer.reset_state()
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False


def _check_group(group: object, device: torch.device) -> None:
    """TypeError, RuntimeError or ValueError for what no model on this device can be reduced over."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"_update_process_group takes a process group, got {type(group).__name__}")
    if type(group) is not dist.ProcessGroup:  # written in Python, torchft's for instance: it knows best
        return
    if group not in _world.pg_map and _name_of(group):
        raise RuntimeError(
            f"the process group {_name_of(group)!r} was destroyed by destroy_process_group(): make a new one"
        )
    if backend_of(group, device.type) is None:
        kinds = ", ".join(sorted({d.type for d in group._device_types})) or "none"
        raise ValueError(
            f"the process group has no backend for {device.type} tensors, and the model is on {device}: it has "
            f"one for {kinds}. Make it with a backend for {device.type}"
        )


def _name_of(group: dist.ProcessGroup) -> str:
    try:
        return str(group.group_name)
    except RuntimeError:
        return ""  # never had one: torch did not make it
