"""A DistributedDataParallel that goes on over another process group: ranks leave, die, or join."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _rank_not_in_group, _world

from torchddp.comm_hooks import CommHook
from torchddp.ddp import model_check
from torchddp.ddp.ddp_construction import DDPConstruction
from torchddp.plan import model_plan
from torchddp.transport import select
from torchddp.transport.agreement import align_group_counts


class DDPGroups(DDPConstruction):
    """The part of the wrapper that is about which ranks there are."""

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on over another process group. Collective among its ranks, each of which has this model wrapped.

        Between steps, or after a step that failed: then clear the gradients, which may be averaged in part. The ranks
        agree on buckets, shared memory is attached anew, hooks of ``torchddp.comm_hooks`` follow with what they hold
        back, ``static_graph`` records again, ``bucket_cap_mb="auto"`` plans again. Parameters, buffers and the
        optimizer's state stay as they are on each rank: see :meth:`sync_module_states`. A rank that is not in the group
        calls this as well, or not; its model can't be trained until it gets a group that it is in.

        Raises:
            TypeError: what is no process group.
            ValueError: a group without a backend for the model's device; ranks with different transports.
            RuntimeError: a group that was destroyed; models that differ between its ranks (names the parameters and
                ranks); a communication hook that can't follow. The model keeps the group it had.
            TransportError: a rank of the group has died, or did not come in time.
        """
        if _rank_not_in_group(new_process_group):
            self._reset_for(new_process_group)
            self._group_without_rank = True
            return
        _check_group(new_process_group, self._module_parameters[0].device)
        hooks = self._hooks_that_follow(new_process_group)
        self._reset_for(new_process_group)
        if new_process_group in _world.pg_map:
            align_group_counts(new_process_group)
        devices = [p.device for p in self._module_parameters]
        choice = select.intended_transport(self._transport_choice, new_process_group, devices, collective=True)
        names = [spec.name for spec in self._specs]
        model_check.verify_same_model(self._reduced_params, names, new_process_group, self.device, choice)
        transport = select.open_transport(choice, new_process_group, device=devices[0], timeout=self._timeout)
        self.process_group = new_process_group
        self._group_without_rank = False
        self.reducer.update_process_group(new_process_group, transport)
        if not self.reducer.is_in_graph:
            # Rank 0's buckets: a rank that joins has not measured the order that the others go by.
            self.reducer.adopt_plan(None)
            self.reducer.reset_state()
        if self._plans_itself:
            model_plan.start(self, look_for_kept=False)
        self._adopt_group()
        if self._parameter_check is not None:
            self._parameter_check.restart()
        self.logger.rebind(self.process_group)
        for hook in hooks:
            hook.rebind(self)

    def _reset_for(self, new_process_group: Any) -> None:
        # As torch's own does, whose reducer would not know the new transport.
        self._has_rebuilt_buckets = False
        model_plan.end(self)
        self.reducer.reset_state()
        if self.static_graph:
            self._static_graph_delay_allreduce_enqueued = False

    def _hooks_that_follow(self, new_process_group: Any) -> list[CommHook]:
        """RuntimeError for hooks that would go on sending to the old ranks."""
        following: list[CommHook] = []
        if self._has_builtin_hook and new_process_group is not self.process_group:
            raise RuntimeError(
                f"the built-in communication hook of rank {self._own_rank} sends over the process group that it was "
                "registered with: use one of torchddp.comm_hooks, FP16 for instance, which follow"
            )
        for hook, state in self._comm_hooks:
            if isinstance(hook, CommHook):
                following.append(hook)
            elif reason := _reason_not_to_follow(hook, state, self.process_group, new_process_group):
                raise RuntimeError(
                    f"the communication hook {getattr(hook, '__qualname__', hook)!r} of rank {self._own_rank} can't "
                    f"follow to another process group: {reason}"
                )
        return following

    def sync_module_states(self, src: int = 0) -> None:
        """Give all ranks the parameters and buffers of one. Collective.

        For ranks that have joined by :meth:`_update_process_group`; those that DistributedDataParallel was told to
        ignore are left alone. In place: optimizers keep their parameters. What an optimizer holds is not sent.

        Args:
            src: that rank, in the model's process group; the same on all.

        Raises:
            ValueError: there is no such rank.
            TransportError: a peer has died, or did not come in time.
        """
        size = self.process_group.size()
        if not 0 <= src < size:
            raise ValueError(f"src must be a rank of the model's process group, 0 to {size - 1}, got {src}")
        self._sync_module(self.reducer.transport, src, buffers=True)


def _check_group(group: Any, device: Any) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"_update_process_group takes a process group, got {type(group).__name__}")
    if type(group) is not dist.ProcessGroup:  # written in Python, torchft's for instance: it knows best
        return
    if group not in _world.pg_map and _name_of(group):
        raise RuntimeError(
            f"the process group {_name_of(group)!r} was destroyed by destroy_process_group(): make a new one"
        )
    if select.backend_of(group, device.type) is None:
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


def _reason_not_to_follow(hook: Any, state: Any, old: Any, new: Any) -> str:
    """Why this hook of torch's kind would send to the wrong ranks; empty as far as can be seen."""
    if state is old and new is not old:
        return (
            "its state is the old one. Give it a state that you can change, with the process group as an attribute, "
            "and change that first"
        )
    if new is not old and getattr(state, "process_group", None) is old:
        return "its state names the old one. Set state.process_group to the new one first"
    is_torchs = getattr(hook, "__module__", "").startswith("torch.distributed.algorithms.ddp_comm_hooks")
    if state is None and is_torchs and new is not dist.group.WORLD:
        return (
            "without a state, torch's hooks send to all ranks of the default group. Use one of torchddp.comm_hooks, "
            "which follow"
        )
    return ""
