"""Changing a wrapped DistributedDataParallel: its parameters, or its process group, when ranks leave, die, or join."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchddp import _torch
from torchddp.ddp import hooks, model
from torchddp.ddp.observers import Observers
from torchddp.ddp.same_model import MAX_DIFFERENCES
from torchddp.ddp.session import ReducerSession
from torchddp.ddp.states import send_states
from torchddp.ddp.wrapper import Wrapper
from torchddp.transport.agreement import Agreement, backend_of, by_value, list_problems


def refresh_trainable(ddp: Wrapper, change_owners: Callable[[], None] = lambda: None) -> None:
    """See `DistributedDataParallel.refresh_trainable`. `change_owners` is called once all agree. Collective."""
    if reason := _reason_against(ddp):
        raise RuntimeError(f"refresh_trainable() can't be called on rank {ddp.process_group.rank()}: {reason}")
    session = ddp.session
    device = session.device
    with contextlib.suppress(Exception):  # raised again below, where the other ranks are told
        device = next(ddp.module.parameters()).device
    with Agreement("refresh_trainable()", ddp.process_group, device, session.digests()) as agreement:
        ddp.parameters_to_ignore |= ddp._names_to_ignore()
        states, new = _states_of(ddp)
        _agree(ddp, states, agreement)
    change_owners()
    if session.options.init_sync and session.policy.sends_states:
        send_states(ddp, session.reducer.transport, new, 0, session.wait_limit)
    ddp.observers.close()
    session.close()
    ddp._module_parameters = _parameters_of(ddp)
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)


def refresh_if_changed(ddp: Wrapper) -> None:
    """Before a forward: `refresh_trainable` if any rank's parameters have changed. Collective if steps are reduced."""
    session = ddp.session
    if not (session.synchronizes or session.reduces_now) or session.is_joining:
        return
    changed = session.has_changed()
    if session.policy.ranks_compare_changes and session.process_group.size() > 1:
        session.agree_once()
        changed = any(flag for (flag,) in session.exchange(int).gather([int(changed)]))
    if changed:
        ddp.refresh_trainable()


def restore_modes(ddp: Wrapper, before: ReducerSession) -> None:
    """Restore the previous session's modes on the new one. Collective if the hooks are."""
    reducer = ddp.reducer
    ddp._has_rebuilt_buckets = False
    ddp.require_forward_param_sync = True  # the next forward sends buffers to all ranks, as the first one does
    if ddp.static_graph:
        reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if ddp.mixed_precision is not None:
        _prepare_mixed_precision(ddp, ddp.mixed_precision)
    if ddp._builtin_hook is not None:
        reducer.register_builtin_comm_hook(ddp._builtin_hook)
        ddp.logger._set_comm_hook_name(str(ddp._builtin_hook))
    if ddp._lazy_init_ran and any(hasattr(p, "_in_backward_optimizers") for p in ddp._module_parameters):
        ddp._comm_hooks.clear()  # torch's hook that steps the optimizers; rebuilt to include new parameters
        ddp._setup_in_backward_optimizers()
    else:
        for hook, state in ddp._comm_hooks:
            hooks.follow_parameters(hook, state, ddp)
            ddp._install_comm_hook(state, hook)
    reducer.take_over(before.reducer)


def _reason_against(ddp: Wrapper) -> str:
    if ddp._use_python_reducer:
        return "torch._dynamo.config.optimize_ddp='python_reducer' reduces its gradients: wrap the model again"
    if ddp.session.is_joining:
        return "ranks in a join() context that have run out of inputs would not take part: leave the context first"
    return "" if ddp.session.is_in_group else "this rank is not in the model's process group"


def _check(ddp: Wrapper) -> None:
    """Raise what prevents a refresh on this rank, and what the next session would raise."""
    session = ddp.session
    session.reducer.check_not_unfinished()
    if session.reducer.is_in_graph:
        raise RuntimeError(
            "a captured CUDA graph holds the addresses of the buckets: freeze and thaw before the capture"
        )
    named = {n: p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore}
    if empty := [n for n, p in named.items() if p.is_meta or isinstance(p, torch.nn.UninitializedParameter)]:
        raise RuntimeError(
            f"{model.they_were(empty)} without values (on the meta device, or of a lazy module before its first "
            "forward): initialize them first"
        )
    if not any(p.requires_grad for p in named.values()):
        raise RuntimeError(
            "no parameter of the module requires grad, so there is nothing to train. Nothing was changed: thaw some"
        )
    new = [n for n, p in named.items() if p.requires_grad and p.grad is not None and id(p) not in session.reduced_ids]
    if new and session.is_weighing:
        raise RuntimeError(
            f"{model.they_were(new)} given gradients in this weighted step before refresh_trainable() was called, "
            "so their weights are unknown. Call it before the step's first weigh(), or clear these gradients."
        )
    kinds = sorted({p.device.type for p in named.values()})
    if len(kinds) > 1:
        where = " and ".join(kinds)
        raise ValueError(
            f"the module's parameters must be on one type of device, but are on {where}: move the new ones first"
        )
    before = ddp._module_parameters
    ddp._module_parameters = _parameters_of(ddp)
    try:
        parameters, sparse = ddp._build_params_for_reducer()
        names = model.names_in_order(ddp._build_debug_param_to_name_mapping(parameters))
    finally:
        ddp._module_parameters = before
    ddp._options.precision.mode().check(ddp, parameters, names, sparse)
    for hook, _ in ddp._comm_hooks:
        hooks.check_attached(hook, ddp)


def _parameters_of(ddp: Wrapper) -> list[torch.nn.Parameter]:
    return [p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]


def _states_of(ddp: Wrapper) -> tuple[dict[str, str], list[torch.Tensor]]:
    """By name, in words: the parameters, and new buffers if they are sent. Then those that are new."""
    session, ignored = ddp.session, ddp.parameters_to_ignore
    known = {id(parameter) for parameter in ddp._module_parameters}
    parameters = dict(ddp.module.named_parameters())
    buffers = dict(ddp.module.named_buffers()) if session.options.sends_buffers_at_init else {}
    states, new = {}, []
    for name, tensor in {**parameters, **buffers}.items():
        if name in ignored or name in session.buffer_names:
            continue
        role = "a buffer" if name in buffers else "trained" if tensor.requires_grad else "frozen"
        if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
            states[name] = f"{role}, without values"
        else:
            tensor = model.local_of(tensor).detach()
            is_plain = tensor.layout != torch.strided or tensor.is_contiguous()
            strides = "" if is_plain else f" with strides {tensor.stride()}"
            states[name] = f"{role} ({str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{strides})"
        if id(parameters.get(name)) not in known:
            states[name] += ", new"
            new.append(tensor)
    return states, new


def _agree(ddp: Wrapper, states: dict[str, str], agreement: Agreement) -> None:
    """Collective: raise on every rank if one has a problem or their models differ."""
    problem: Exception | None = None
    try:
        _check(ddp)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = type(error)(f"refresh_trainable() on rank {ddp.session.rank}: {error}")
    reason = "" if problem is None else f"{type(problem).__name__}: {problem}"
    by_rank = agreement.gather((reason, states))
    if by_rank is not None:
        if differences := find_differences([theirs for _, theirs in by_rank]):
            more = len(differences) - MAX_DIFFERENCES
            listed = "; ".join(differences[:MAX_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
            raise RuntimeError(
                f"refresh_trainable() on rank {ddp.session.rank}: the model is not the same on all ranks: {listed}. "
                "Nothing was changed. Freeze, thaw, add and remove the same parameters on every rank."
            )
        if problem is None and (others := list_problems([theirs for theirs, _ in by_rank])):
            raise RuntimeError(f"refresh_trainable() failed on other ranks, and changed nothing: {others}")
    if problem is not None:
        raise problem


def find_differences(by_rank: Sequence[dict[str, str]]) -> list[str]:
    """Describe each parameter that differs between ranks; empty if they can be reduced together.

    Names may differ, as when the model is wrapped, unless the same names appear in another order.
    """
    names = [list(own) for own in by_rank]
    only_names = all([*own.values()] == [*by_rank[0].values()] for own in by_rank)
    found = []
    for name in () if only_names else dict.fromkeys(name for own in names for name in own):
        said = [own.get(name, "missing") for own in by_rank]
        if len(set(said)) > 1:
            found.append(f"'{name}' is {by_value(said)}")
    moved = [str(rank) for rank, own in enumerate(names) if own != names[0] and sorted(own) == sorted(names[0])]
    if moved:
        found.append(f"rank {', '.join(moved)} has its parameters in a different order from rank 0")
    return found


def _prepare_mixed_precision(ddp: Wrapper, precision: _torch.MixedPrecision) -> None:
    """As torch's constructor does; what already exists stays as it is."""
    assert precision.param_dtype is not None  # the constructor of the reducer that this one replaces needed it
    ddp.reducer._set_mixed_precision_param_dtype(precision.param_dtype)
    _torch.setup_mixed_precision_params(precision, ddp.module)
    _torch.cast_buffers(precision, ddp.module)
    wait = ddp._module_wait_for_copy_hook
    for module in ddp.module.modules():
        if wait not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(wait, prepend=False, with_kwargs=True)


# --- another process group ---


def update_process_group(ddp: Wrapper, new_group: dist.ProcessGroup) -> None:
    """See `DistributedDataParallel.update_process_group`. Collective among the group's ranks."""
    session = ddp.session
    if _torch.rank_not_in_group(new_group):
        ddp.observers.close()
        ddp._has_rebuilt_buckets = False
        ddp.reducer.reset_state()
        session.is_in_group = False  # no step can be reduced until it gets a group that contains this rank
        return
    _check_group(new_group, session.device)
    with session.agreement(new_group):  # of `rebind`, in which the others get this rank's error
        following = hooks.hooks_that_follow(ddp, new_group)
    session.rebind(new_group)
    ddp._has_rebuilt_buckets = False
    ddp.process_group = new_group
    ddp.observers.close()
    ddp.observers = Observers(session)
    ddp.logger.rebind(new_group)
    for hook in following:
        hook.rebind(ddp)


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
