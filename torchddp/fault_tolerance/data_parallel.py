"""DistributedDataParallel whose ranks are the replicas of a torchft Manager."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from torchddp import _torch, notices
from torchddp.comm_hooks import CommHook
from torchddp.ddp.former_names import current
from torchddp.ddp.module import OPTIONS
from torchddp.ddp.module import DistributedDataParallel as DDP
from torchddp.ddp.session import ReducerPolicy
from torchddp.fault_tolerance import replica_state
from torchddp.fault_tolerance.manager import Manager, ManagerGroup, check_manager, count_participants

_TALK = "replicas come and go, and one that has just been restarted must be able to wrap its model alone"
_SAME_BUCKETS = "a healing replica must have the same buckets as the others"
# Option: (values equivalent to leaving it out, the reason against others).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "process_group": ((None,), "gradients go through the manager"),
    "device_mesh": ((None,), "gradients go through the manager"),
    "init_sync": ((False,), f"{_TALK}: torchft's Manager sends the weights (init_sync=True there)"),
    "broadcast_buffers": ((None, False), f"no replica's buffers are authoritative: {_TALK}"),
    "forward_sync_buffers": ((None, False), f"no replica's buffers are authoritative: {_TALK}"),
    "transport": (("auto", "c10d"), "the manager's process group moves the gradients"),
    "timeout": ((None,), "the manager's timeout applies: torchft.Manager(timeout=...)"),
    "precision.wire": ((None,), "the manager's process group sends gradients as they are"),
    "mixed_precision": ((None,), "its communication hook averages over a fixed group; use torch.autocast"),
    "delay_all_reduce_named_params": ((None,), "it reduces over a fixed group"),
    "param_to_hook_all_reduce": ((None,), "it reduces over a fixed group"),
    "skip_all_reduce_unused_params": ((False,), "a replica can't know alone that the others skip the same buckets"),
    "checks.stall_report": ((None, 0), "the quorum leaves a replica behind that stalls for the manager's timeout"),
    "auto_refresh_trainable": ((False,), _SAME_BUCKETS),
    "checks.parameters_every": ((None,), "it compares ranks of a fixed group"),
}


class _ManagerPolicy(ReducerPolicy):
    ranks_agree = False  # replicas come and go


class DistributedDataParallel(DDP):
    """`torchddp.DistributedDataParallel` under a ``torchft.Manager``: replicas may die and join between steps.

        manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), min_replica_size=1, load_state_dict=..., ...)
        model = torchddp.fault_tolerance.DistributedDataParallel(manager, module)
        optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters()))
        for batch in data:
            optimizer.zero_grad()          # starts the quorum
            loss_of(model(batch)).backward()
            optimizer.step()               # only if manager.should_commit()

    Replaces torchft's class (per-step fault tolerance: torchft, Meta 2024). Buckets go through ``Manager.allreduce``
    while backward runs, with a single wait at its end; torchft's class waits for each before it starts the next. The
    average is over the replicas that take part in the step.

    If a peer dies during a reduction, ``backward()`` returns with invalid gradients, ``should_commit()`` returns False,
    and the next step continues without the peer. Buckets always follow the order of registration, so that a healing
    replica has the same ones. With ``find_unused_parameters`` a parameter counts as used if any replica used it.

    Construction is not collective: a replica may join alone. In a replica group of several ranks, each rank has its own
    manager, whose peers are the same rank of the other groups, as in torchft.

    Args:
        manager: may be shared by several models.
        module: on one device; replicas must wrap equal modules with equal options.
        carry_weights: the manager sends weights and buffers to healing replicas. False: the state_dict functions given
            to the manager do that, and the manager only sends the list of buckets, which is compared.
        **kwargs: other options of :class:`torchddp.DistributedDataParallel`. Those that need a fixed group of ranks
            raise an error with the reason. ``comm_hook`` may be a `torchddp.comm_hooks.PowerSGD`, which only sends
            sums, with one model per manager. Its residuals are lost with a failed step, and zero in a healing replica.

    Raises:
        TypeError: ``manager`` is not a Manager.
        ValueError: a manager without a process group, an option that doesn't work with one, sparse gradients.
        RuntimeError: backward before ``manager.start_quorum()``.
        TransportError: in backward: no quorum in the manager's time limits; says if the lighthouse can be reached.
    """

    _ddp_policy = _ManagerPolicy()

    def __init__(self, manager: Manager, module: nn.Module, *, carry_weights: bool = False, **kwargs: Any) -> None:
        check_manager(manager, "DistributedDataParallel")
        kwargs = current(kwargs, [*OPTIONS], "DistributedDataParallel")
        _check_options(kwargs, module)
        group = ManagerGroup(manager)
        options = {**kwargs, "broadcast_buffers": None, "forward_sync_buffers": False}
        super().__init__(module, **{**options, "process_group": group, "init_sync": False, "transport": "c10d"})
        self._manager_group = group
        self._has_rebuilt_buckets = True  # never: a healing replica would keep the initial ones
        self.reducer.set_divisor(partial(count_participants, manager))
        replica_state.register(manager, self, weights=carry_weights)

    @property
    def manager(self) -> Manager:
        return self._manager_group.manager

    def _begin_step(self) -> None:
        # A static graph has no such maps, and a replica that just joined must not wait for one that none sends.
        self._manager_group.sums_used = self.find_unused_parameters and not self.static_graph
        if self.require_backward_grad_sync:
            self._recover()
        super()._begin_step()

    def _weigh(self, weight: float, count: float, **part: bool) -> None:
        self._recover()  # here, because it would drop this weight later
        super()._weigh(weight, count, **part)

    def _recover(self) -> None:
        if self._manager_group.take_failure():
            notices.tell("retry", what="step", step=self.manager.current_step())
            # A failed operation may still write to its buckets: use new memory.
            self.reducer.reset_state()
            for hook in replica_state.hooks_of(self):
                hook.start_over()  # its residuals were computed from invalid sums

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """For `torchddp.comm_hooks.PowerSGD`, one model per manager. RuntimeError for others, see `ManagerGroup`."""
        if not isinstance(hook, CommHook):
            self._refuse("this communication hook", "it would bypass the manager; comm_hooks.PowerSGD does not")
        super().register_comm_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        self._refuse("this communication hook", "it would bypass the manager; comm_hooks.PowerSGD does not")

    def join_hook(self, **kwargs: object) -> NoReturn:
        """RuntimeError: replicas may leave at any time, and the others continue."""
        self._refuse("join()", "a replica that has run out of inputs may just leave, and the others continue")

    def replan(self) -> None:
        """RuntimeError: buckets can't change."""
        self._refuse("replan()", _SAME_BUCKETS)

    def refresh_trainable(self) -> None:
        """RuntimeError: buckets can't change."""
        self._refuse("refresh_trainable()", f"{_SAME_BUCKETS}; wrap it again")

    def update_process_group(self, new_process_group: object) -> None:
        self._refuse("update_process_group()", "the manager reconfigures its own group at each change of the quorum")

    def __getstate__(self) -> dict[str, Any]:
        self._refuse("a copy (pickle, deepcopy)", "it could not share the manager; copy model.module and wrap that")

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise RuntimeError(f"{what} doesn't work for a model under a torchft Manager: {why}.")


def _check_options(options: Mapping[str, Any], module: torch.nn.Module) -> None:
    """ValueError, with the reason, for an option that doesn't work under a manager, and for sparse gradients."""
    fields = {
        f"{argument}.{name}": value
        for argument in ("precision", "checks")
        for name, value in getattr(options.get(argument), "__dict__", {}).items()
    }
    for name, value in {**options, **fields}.items():
        if name not in _REFUSED:
            continue
        allowed, reason = _REFUSED[name]
        if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
            raise ValueError(f"{name}={value!r} conflicts with a torchft Manager: {reason}")
    if options.get("bucket_cap_mb") == "auto":
        raise ValueError(
            "bucket_cap_mb='auto' conflicts with a torchft Manager: a healing replica has measured nothing, and must "
            "have the same buckets as the others. Pass a number of MiB, or None."
        )
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse:
            raise ValueError(f"embedding {name!r} has sparse=True: torchft can't all-reduce sparse gradients")
    if _torch.dynamo_reduces():
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' reduces over a fixed group and bypasses the manager"
        )


class PureDistributedDataParallel(nn.Module):
    """Starts one ``Manager.allreduce`` for each gradient as soon as it is final, and waits for all of them before
    ``backward()`` returns. (torchft's class never waits: its futures are lazy, and averages stay sums.)

    For models that the reducer doesn't support; :class:`DistributedDataParallel` is faster. Every backward reduces:
    there is no ``no_sync()``. All replicas must use the same parameters in the same order. After an error,
    ``backward()`` returns and ``should_commit()`` returns False, as with torchft's class.

    Args:
        manager: a ``torchft.Manager``.
        module: may be on several devices.

    Raises:
        TypeError: ``manager`` is not a Manager.
        ValueError: it has no process group.
        RuntimeError: backward before ``manager.start_quorum()``.
        TransportError: in backward: there was no quorum within the manager's time limits.
    """

    def __init__(self, manager: Any, module: nn.Module) -> None:
        super().__init__()
        check_manager(manager, "PureDistributedDataParallel")
        self.module = module
        sums = _Averages(manager)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(sums.start)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``module(*args, **kwargs)``."""
        return self.module(*args, **kwargs)


class _Averages:
    """The averages in flight in the current backward."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._lock = threading.Lock()  # hooks of several devices run in several threads
        self._works: list[Any] = []
        self._backward: int | None = None

    def start(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        with self._lock:
            backward = _torch.graph_task()
            if backward != self._backward:
                count_participants(self._manager)  # raises, with the reason, if there is no quorum
                # A backward that ended with an error never reached its end.
                self._works, self._backward = [], backward
                _torch.at_end_of_backward(self.finish)
            self._works.append(self._manager.allreduce(parameter.grad))

    def finish(self) -> None:
        works, self._works, self._backward = self._works, [], None
        for work in works:
            work.wait()  # False after an error, which the manager has recorded
