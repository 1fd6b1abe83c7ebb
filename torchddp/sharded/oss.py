"""OSS: an optimizer whose state is sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchddp.sharded.delivery import Delivery
from torchddp.sharded.flat_step import FlatStep
from torchddp.sharded.grad_norm import sharded_norm
from torchddp.sharded.grad_scaling import agree_on_inf, unscale
from torchddp.sharded.parameter_broadcast import ParameterBroadcast, plan_buckets
from torchddp.sharded.partition import partition
from torchddp.sharded.sharded_state import check_groups, check_shapes, gather_state, index_of_ids, to_cpu
from torchddp.transport.agreement import message_device, verify_agreement

# What each side of OSS has of its own in a parameter group; all the rest is shared.
OWN_KEYS = ("params", "param_names")


class Plan(NamedTuple):
    """Which rank owns which parameter, by index, and the first state of those that are new to this rank."""

    owners: list[int | None]
    state: dict[torch.Tensor, Any]


class OSS(Optimizer):
    """Any torch optimizer, with its state sharded over ranks (ZeRO stage 1, Rajbhandari et al. 2020).

    Each rank keeps state for the parameters it owns, updates those, and sends them to the others. Gradients must be
    the same on all ranks, as `DistributedDataParallel` leaves them.

        optimizer = torchddp.optim.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)

    ``param_groups`` holds all parameters, for learning rate schedulers and users to read and change; ``state`` only
    that of this rank's parameters. Parameters with ``requires_grad=False`` have no owner: see `refresh_trainable`.

    Args:
        params: parameters, groups, or ``named_parameters()``, as for any optimizer; the same on all ranks.
        optim: the optimizer class. It must treat parameters one by one: LBFGS is refused.
        group: the process group to shard over; by default all ranks.
        broadcast_buffer_size: elements of the largest message that updated parameters travel in, unless one parameter
            is larger; -1: one message for each owner and dtype.
        broadcast_fp16: float32 parameters travel as float16, and all ranks, the owner too, go on with the rounded
            values: replicas stay equal, at the price of half precision weights (|w| < 65504, small updates vanish).
        defaults: the options of ``optim``.

    The constructor is collective: it raises on every rank if the parameters differ between ranks (RuntimeError).
    Raises TypeError if ``optim`` is no optimizer class, ValueError for a parameter given twice, a wrong buffer size,
    or a rank outside of ``group``.
    """

    # The scaler then leaves it to `step` to skip or to unscale: ranks must agree on it, or some wait for ever.
    _step_supports_amp_scaling = True
    _built = False

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[Optimizer] = torch.optim.AdamW,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        **defaults: Any,
    ) -> None:
        _check_class(optim)
        if broadcast_buffer_size != -1 and broadcast_buffer_size < 1:
            raise ValueError(f"broadcast_buffer_size must be -1 or at least 1 element, got {broadcast_buffer_size}")
        self._process_group = _resolve_group(group)
        self.rank = self._process_group.rank()
        self.world_size = self._process_group.size()
        self._optim, self._optim_options = optim, defaults
        self._bucket_numel, self._half = broadcast_buffer_size, broadcast_fp16
        self._params: list[torch.Tensor] = []
        self._names: list[str] = []
        self._owners: list[int | None] = []
        self._active: list[bool] = []
        self._consolidated: dict[Any, Any] | None = None
        self._delivery: Delivery | None = None
        error: Exception | None = None
        try:
            self._inner = optim([{"params": []}], **defaults)
            self._inner.param_groups.clear()
            super().__init__(params, self._inner.defaults)
        except Exception as caught:
            error = caught
        active = self._trainable()
        plan = self._agree_on_plan(active, error)
        self._built = True
        self._flat_step = FlatStep(self._inner)
        self._take(plan, active)

    # --- what there is ---

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this rank's parameters. Its options are overwritten with those of ``param_groups``."""
        return self._inner

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that the state is sharded over."""
        return self._process_group

    @property
    def param_to_rank(self) -> Mapping[torch.Tensor, int]:
        """The rank (in the group) that owns each parameter; parameters without an owner are not in it. Read-only."""
        return self._param_to_rank

    @property
    def is_delivered(self) -> bool:
        """Whether a ShardedDataParallel sends its parameters."""
        return self._delivery is not None

    def deliver_through(self, delivery: Delivery | None) -> None:
        """Called by the data parallel module that reduces gradients to their owners alone, and gathers parameters.

        None: it does so no more.
        """
        self._delivery = delivery
        self._flat_step.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. The new parameters go to the ranks that own the fewest elements. Collective."""
        if self._delivery is not None:
            new = param_group["params"]
            new = param_group["params"] = [new] if isinstance(new, torch.Tensor) else list(new)
            self._delivery.check_new([item[1] if isinstance(item, tuple) else item for item in new])
        super().add_param_group(param_group)
        try:
            self._list_parameters()
        except ValueError:
            self.param_groups.pop()
            raise
        if not self._built:  # called by the constructor of torch's class: owners are found for all groups at once
            return
        active = [*self._active, *(p.requires_grad for p in self._params[len(self._active) :])]
        try:
            plan = self._agree_on_plan(active)
        except Exception:
            self.param_groups.pop()
            self._list_parameters()
            raise
        self._take(plan, active)

    def refresh_trainable(self) -> None:
        """To be called after parameters were frozen or thawed (``requires_grad``). Collective.

        Newly trainable parameters without an owner go to the ranks that own the fewest elements. All others stay where
        they are with their state; those that are frozen are left out of steps until they are thawed and this is called
        again.
        """
        active = self._trainable()
        self._take(self._agree_on_plan(active), active)

    # --- a step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters, then all ranks get those of all others. Collective.

        The closure is called once on every rank, and its loss returned. Raises RuntimeError for a sparse gradient, and
        for the gradient of a parameter that was thawed without `refresh_trainable`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        if self._skipped_by_scaler():
            return loss
        self._consolidated = None
        if self._delivery is not None:
            self._delivery.before_step()
        _copy_options(self.param_groups, self._inner.param_groups)
        memory = () if self._delivery is None else self._delivery.own_memory()
        with self._frozen_left_out(), self._flat_step.handed_over(memory):
            self._inner.step()
        _copy_options(self._inner.param_groups, self.param_groups)
        if self._delivery is not None and not self._half:
            self._delivery.after_step()
        else:
            self._broadcast.run()
        return loss

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``; returns the norm before. Collective.

        As ``torch.nn.utils.clip_grad_norm_`` over all parameters, to rounding; each rank measures the gradients of its
        own parameters. The norm is a scalar of the parameters' dtype, of float32 at least. Raises RuntimeError for a
        norm that is not finite if ``error_if_nonfinite``, ValueError for ``norm_type`` <= 0.
        """
        self._check_gradients()
        grads = [p.grad for p, owner in zip(self._params, self._owners, strict=True) if owner == self.rank]
        dtype = torch.float32
        for param in self._params:
            dtype = torch.promote_types(dtype, param.dtype.to_real())
        present = [grad for grad in grads if grad is not None]
        device = self._params[0].device if self._params else self._message_device()
        norm = sharded_norm(present, float(norm_type), dtype, self._process_group, device)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the norm of the gradients of order {norm_type} is {norm.item()}: it can't be clipped")
        torch.nn.utils.clip_grads_with_norm_(self._params, max_norm, norm, foreach)
        return norm

    # --- state ---

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Brings all state to the CPU of one rank (of the group), where `state_dict` then returns it. Collective.

        One owner sends at a time; the other ranks hold nothing. What was brought is dropped with the next step.
        """
        if not 0 <= recipient_rank < self.world_size:
            raise ValueError(
                f"recipient_rank must be a rank of the group (0 to {self.world_size - 1}), got {recipient_rank}"
            )
        by_index = gather_state(
            lambda index: self._inner.state.get(self._params[index]),
            self._owners,
            [param.numel() for param in self._params],
            recipient_rank,
            self._process_group,
            self._message_device(),
        )
        self._consolidated = None
        if self.rank == recipient_rank:
            # What belongs to no parameter is on every rank.
            others = {key: to_cpu(v) for key, v in self._inner.state.items() if not isinstance(key, torch.Tensor)}
            self._consolidated = {**{self._params[index]: state for index, state in by_index.items()}, **others}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in the form of ``optim``'s own state_dict over all parameters, on one rank.

        Raises RuntimeError on a rank that `consolidate_state_dict` has not brought it to since the last step. With one
        rank there is nothing to bring together.
        """
        if self.world_size == 1:
            return super().state_dict()
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank} has no consolidated state: call consolidate_state_dict(recipient_rank={self.rank}) "
                "on all ranks first, after the last step; local_state_dict() is this rank's part"
            )
        return self._packed(self._consolidated)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in the form of `state_dict`, and under "sharded_params" what it is a part of.

        For torch.distributed.checkpoint (see `torchddp.optim.load_checkpoint`), or for a file of each rank.
        """
        return {**self._packed(self._inner.state), "sharded_params": self._indices_of(self.rank)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's part of a whole state: of OSS on any number of ranks, or of ``optim`` without OSS.

        All ranks load the same. A `local_state_dict` can be loaded by a rank all of whose parameters it covers. Raises
        ValueError, and changes nothing, for the state of another model or for a part of other parameters.
        """
        saved = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, saved)
            saved = saved if changed is None else changed
        by_index = self.check_state(saved)
        part = saved.get("sharded_params")
        missing = [] if part is None else sorted({*self._indices_of(self.rank)} - {*part})
        if missing:
            raise ValueError(
                f"this is another rank's part of the state: {self._names[missing[0]]} is not in it. Load a whole "
                "state (consolidate_state_dict) or a checkpoint (torchddp.optim.load_checkpoint)"
            )
        mine = self._indices_of(self.rank) if part is not None else self.claim(by_index)
        known = index_of_ids(saved["param_groups"])
        state = {key: value for key, value in saved["state"].items() if key not in known}
        state |= {index: by_index[index] for index in mine if index in by_index}
        self._load(state, saved["param_groups"])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def check_state(self, state_dict: Mapping[str, Any]) -> dict[int, Any]:
        """The saved state by parameter index. Raises ValueError if it is of another model. Changes nothing."""
        check_groups(state_dict, [len(group["params"]) for group in self.param_groups])
        index_of = index_of_ids(state_dict["param_groups"])
        by_index = {index_of[key]: value for key, value in state_dict["state"].items() if key in index_of}
        torch_own = self._optim.__module__.startswith("torch.optim")
        check_shapes(by_index, self._params, self._names.__getitem__, self._inner.state, torch_own)
        return by_index

    def claim(self, indices: Iterable[int]) -> list[int]:
        """Finds owners for those parameters that have none, frozen ones too, so that state for them can be loaded.

        To be called with the same indices on all ranks. Returns the indices of all parameters of this rank.
        """
        claimed = {*indices}
        wanted = [on or index in claimed for index, on in enumerate(self._active)]
        self._take(self._plan_owners(wanted), self._active)
        return self._indices_of(self.rank)

    def __getstate__(self) -> NoReturn:
        raise TypeError("an OSS can't be copied or pickled: it belongs to a process group; use its state_dict")

    # --- inside ---

    def _trainable(self) -> list[bool]:
        return [param.requires_grad for param in self._params]

    def _indices_of(self, rank: int) -> list[int]:
        return [index for index, owner in enumerate(self._owners) if owner == rank]

    def _message_device(self) -> torch.device:
        """Where messages that start on the CPU travel: there, if the group can."""
        return message_device(self._process_group)

    def _list_parameters(self) -> None:
        """Takes down all parameters and their names, in the order of the groups. Raises ValueError for one twice."""
        params: list[torch.Tensor] = []
        names: list[str] = []
        for number, group in enumerate(self.param_groups):
            given = group.get("param_names")
            for place, param in enumerate(group["params"]):
                where = f"parameter {place} of group {number}"
                names.append(f"{where} ('{given[place]}')" if given else where)
                params.append(param)
        if len(set(params)) != len(params):
            twice = next(index for index, param in enumerate(params) if param in set(params[:index]))
            raise ValueError(f"{names[twice]} is given twice")
        self._params, self._names = params, names

    def _describe(self) -> list[str]:
        """One line for each parameter: what must agree between ranks."""
        devices = self._device_numbers()
        return [
            f"{name}: {str(p.dtype).removeprefix('torch.')}{list(p.shape)} on {p.device.type} device {device}, "
            f"{'trainable' if p.requires_grad else 'frozen'}"
            for name, p, device in zip(self._names, self._params, devices, strict=True)
        ]

    def _device_numbers(self) -> list[int]:
        """Devices by first appearance: each rank has the same parameter on another GPU."""
        order = {device: number for number, device in enumerate(dict.fromkeys(p.device for p in self._params))}
        return [order[param.device] for param in self._params]

    def _agree_on_plan(self, wanted: list[bool], error: Exception | None = None) -> Plan:
        """As `_plan_owners`. Collective: raises on every rank if one has an error, or if their parameters differ."""
        plan = Plan([], {})
        if error is None:
            try:
                plan = self._plan_owners(wanted)
            except Exception as caught:
                error = caught
        verify_agreement(self._describe(), error, self._process_group)
        return plan

    def _plan_owners(self, wanted: list[bool]) -> Plan:
        """Finds owners for the wanted parameters that have none.

        Changes nothing. The optimizer class may refuse a parameter here, or keep state for it from the start.
        """
        known = [*self._owners, *[None] * (len(self._params) - len(self._owners))]
        numels = [param.numel() for param in self._params]
        owners = partition(numels, self._device_numbers(), self.world_size, known, wanted)
        indices = range(len(owners))
        new = {self._params[i] for i in indices if owners[i] == self.rank and known[i] is None}
        groups = [
            {**_options(group), "params": [param for param in group["params"] if param in new]}
            for group in self.param_groups
        ]
        if not new:
            return Plan(owners, {})
        newest = self._optim([group for group in groups if group["params"]], **self._optim_options)
        return Plan(owners, dict(newest.state))

    def _take(self, plan: Plan, active: list[bool]) -> None:
        """Makes a plan the present one."""
        owners = plan.owners
        changed = (owners, active) != (self._owners, self._active)
        self._owners, self._active = owners, active
        mine = {self._params[index] for index in self._indices_of(self.rank)}
        for group in self.param_groups[len(self._inner.param_groups) :]:
            self._inner.add_param_group({**_options(group), "params": []})
        for inner, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            inner["params"] = [param for param in group["params"] if param in mine]
        self._inner.state.update(plan.state)
        self.state = self._inner.state
        self._flat_step.forget()
        self._consolidated = None
        owned = {p: rank for p, rank in zip(self._params, owners, strict=True) if rank is not None}
        self._param_to_rank = MappingProxyType(owned)
        senders = [rank if on else None for rank, on in zip(owners, active, strict=True)]
        buckets = plan_buckets(self._params, senders, self._bucket_numel)
        self._broadcast = ParameterBroadcast(buckets, self._process_group, self._half)
        if changed and self._delivery is not None:
            self._delivery.owners_changed()

    def _check_gradients(self) -> None:
        for index, param in enumerate(self._params):
            if param.grad is None:
                continue
            if param.grad.layout != torch.strided:
                raise RuntimeError(f"OSS takes no sparse gradients, and that of {self._names[index]} is sparse")
            if param.requires_grad and not self._active[index]:
                raise RuntimeError(
                    f"{self._names[index]} has a gradient, but was frozen when owners were found: call "
                    "refresh_trainable() on all ranks after thawing parameters"
                )

    def _skipped_by_scaler(self) -> bool:
        """What GradScaler left to do: agree whether to skip, and divide by the scale it has not divided by yet."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return False
        sharded = self._delivery is not None
        if agree_on_inf(found_inf, self._process_group, self._message_device(), sharded=sharded):
            return True
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            unscale([param.grad for param in self._params if param.grad is not None], scale)
        return False

    @contextmanager
    def _frozen_left_out(self) -> Iterator[None]:
        """Hides gradients that are left on frozen parameters, which the inner optimizer would apply."""
        owned = zip(self._params, self._owners, self._active, strict=True)
        hidden = [(p, p.grad) for p, rank, on in owned if rank == self.rank and not on and p.grad is not None]
        for param, _ in hidden:
            param.grad = None
        try:
            yield
        finally:
            for param, grad in hidden:
                param.grad = grad

    def _packed(self, state: Mapping[Any, Any]) -> dict[str, Any]:
        """torch's own state_dict of all groups, with this state."""
        live, self.state = self.state, state  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = live

    def _load(self, state: Mapping[Any, Any], saved_groups: list[dict[str, Any]]) -> None:
        """Takes state of this rank's parameters, by index, and the options of all groups."""
        index_of = {param: index for index, param in enumerate(self._params)}
        groups = [
            {**_options(saved), "params": [index_of[param] for param in inner["params"]]}
            for saved, inner in zip(saved_groups, self._inner.param_groups, strict=True)
        ]
        self._inner.load_state_dict({"state": state, "param_groups": groups})
        self.state = self._inner.state
        self._flat_step.forget()
        self._consolidated = None
        for group, inner, saved in zip(self.param_groups, self._inner.param_groups, saved_groups, strict=True):
            own = {key: group[key] for key in OWN_KEYS if key in group}
            named = {key: saved[key] for key in OWN_KEYS[1:] if key in saved}
            group.clear()
            group.update({**_options(inner), **own, **named})


def _check_class(optim: Any) -> None:
    if not (isinstance(optim, type) and issubclass(optim, Optimizer)):
        raise TypeError(f"optim must be a class of torch.optim.Optimizer, got {optim!r}")
    if issubclass(optim, OSS):
        raise TypeError("optim must be the class of the optimizer to shard, not OSS itself")
    if issubclass(optim, torch.optim.LBFGS):
        raise TypeError("LBFGS looks at all parameters at once: its state can't be sharded")


def _resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError("OSS needs a process group: call torch.distributed.init_process_group first")
    resolved = dist.group.WORLD if group is None else group
    if not isinstance(resolved, dist.ProcessGroup) or dist.get_rank(resolved) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group that was given to OSS")
    return resolved


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OWN_KEYS}


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for theirs, ours in zip(source, target, strict=True):
        ours.update(_options(theirs))
