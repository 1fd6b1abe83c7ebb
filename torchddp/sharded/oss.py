"""OSS: an optimizer whose state is sharded over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NoReturn, overload

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from torchddp.errors import check_flag
from torchddp.sharded.cost import CostChoice, Costs
from torchddp.sharded.gradients import refuse_local_sgd, sharded_norm, skips_step
from torchddp.sharded.group_optimizers import (
    OWN_KEYS,
    Factory,
    GroupOptimizers,
    check_defaults,
    check_factory,
    copy_options,
    groups_of,
    options_in_words,
    options_of,
)
from torchddp.sharded.parameter_sync import GroupSender, Sender, StepHooks
from torchddp.sharded.partition import ParameterPartition, Share, plan_together
from torchddp.sharded.sharded_state import check_state, gather_state
from torchddp.sharded.steps import OwnedSteps
from torchddp.sharded.written_options import WrittenOptions
from torchddp.transport.agreement import Agreement, in_words, message_device


class OSS(Optimizer):
    """Any torch optimizer with its state sharded over ranks (ZeRO stage 1, Rajbhandari et al. 2020; FairScale's OSS).

    Each rank keeps state for the parameters it owns, updates them, and sends them to the others. Gradients must be
    equal on all ranks, as `DistributedDataParallel` leaves them.

    Example:

        model = torchddp.DistributedDataParallel(module)
        optimizer = torchddp.optim.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
        loss_of(model(batch)).backward()
        optimizer.step()  # updates this rank's parameters, then sends them to the others
        optimizer.consolidate_state_dict(recipient_rank=0)
        if dist.get_rank() == 0:
            torch.save(optimizer.state_dict(), "optimizer.pt")

    A group may name a class of its own, which takes the options of that group only:

        matrices = [param for param in module.parameters() if param.dim() == 2]
        others = [param for param in module.parameters() if param.dim() != 2]
        optimizer = torchddp.optim.OSS(
            [{"params": matrices, "optim": torch.optim.Muon, "lr": 0.02}, {"params": others}],
            optim=torch.optim.AdamW,
            lr=1e-3,
        )

    Owners are chosen so that each rank's updates cost the same (see ``cost`` and `balance`), and as far as that allows
    so that each holds as many bytes. torch's Muon updates a 3-D parameter matrix by matrix.

    With torch's elementwise optimizers and Muon, a rank sends a message's parameters as soon as it has updated them,
    while it updates those of the next; with others, after its whole step.

    An optimizer may write options into its groups (a step count, a learning rate found so far): see `WrittenOptions`.
    ``train`` and ``eval`` of a schedule-free optimizer are collective, and reach the parameters of all ranks.

    ``param_groups`` holds all parameters, for learning rate schedulers and users to read and change; ``state`` only
    that of this rank's parameters. Parameters with ``requires_grad=False`` have no owner: see `refresh_trainable`.

    Attributes:
        optim: the optimizer of this rank's parameters; with several classes, an object with ``param_groups`` and
            ``state`` of all. Its options are overwritten with those of ``OSS.param_groups``.
        process_group, rank, world_size: the group that the state is sharded over, this rank in it, and its size.

    Args:
        params: parameters, groups, or ``named_parameters()``, as for any optimizer; the same on all ranks.
        optim: the class of groups that name none in ``"optim"``, or a function that makes an optimizer of a list of
            groups. It must treat parameters independently: LBFGS is refused.
        group: the process group to shard over; default: all ranks.
        broadcast_buffer_size: elements of the largest message of updated parameters, unless a single parameter is
            larger; -1: 2**21.
        broadcast_fp16: send float32 parameters as float16; all ranks, including the owner, continue with the rounded
            values. Replicas stay equal, but weights have half precision (at most 65504, and small updates vanish).
        cost: what an update costs, for balance. ``"model"``: multiply-adds of Newton-Schulz where the class's name has
            "muon" in it (``ns_steps`` x (2 m^2 n + m^3) for an m x n matrix with m <= n), of the factors of Shampoo and
            SOAP, otherwise elements. ``"measure"``: milliseconds; each shape is timed on one rank. Or a function of
            the parameter and its group.
        defaults: the options of ``optim``.

    The constructor is collective: it raises RuntimeError on every rank if the parameters differ between ranks.
    TypeError if ``optim`` is not an optimizer class; ValueError for a parameter given twice or refused by its class
    (one that is no matrix, by Muon), an invalid size or cost, a wrong group.
    """

    # GradScaler then leaves skipping and unscaling to `step`, where ranks must agree, or some would wait forever.
    _step_supports_amp_scaling = True
    _built = False
    _consolidated: dict[Any, Any] | None

    def __init__(
        self,
        params: ParamsT,
        optim: Factory = torch.optim.AdamW,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        cost: CostChoice = "model",
        **defaults: Any,
    ) -> None:
        self.process_group = _resolve_group(group)
        self.rank, self.world_size = self.process_group.rank(), self.process_group.size()
        self._optim = optim
        self._bucket_numel, self._half = broadcast_buffer_size, broadcast_fp16
        self._partition = ParameterPartition(self.rank, self.world_size)
        self._hooks: weakref.ref[StepHooks] | None = None
        with self._agreement() as agreement:
            check_factory(optim, "optim")
            check_defaults(optim, defaults)
            check_flag("broadcast_fp16", broadcast_fp16)
            if type(broadcast_buffer_size) is not int or (broadcast_buffer_size < 1 and broadcast_buffer_size != -1):
                raise ValueError(
                    f"broadcast_buffer_size must be a number of elements, or -1; got {broadcast_buffer_size!r}"
                )
            self._costs, self._optimizers = Costs(cost), GroupOptimizers(partial(optim, **defaults))
            super().__init__(groups_of(params), {})
            made = [self._complete(number) for number in range(len(self.param_groups))]
            self.defaults = next((one.defaults for one in made if type(one) is self._optimizers.default_kind), {})
            self._verify(agreement)
        active = self._partition.trainable()
        owners, state = self._agree_on_owners(active)
        self._built = True
        self._has_begun = False  # with steps, or with state that was loaded
        self._written = WrittenOptions(self.process_group)
        self._steps = OwnedSteps(self._optimizers, self.rank)
        self._apply(owners, active, state)

    @property
    def optim(self) -> Any:
        """The optimizer of this rank's parameters; with several classes, an object with their groups and state."""
        return self._optimizers.single or self._optimizers

    @property
    def param_to_rank(self) -> Mapping[torch.Tensor, int]:
        """The rank (in the group) that owns each parameter; parameters without an owner are missing. Read-only."""
        return MappingProxyType(self._partition.owner_of)

    def balance(self) -> list[Share]:
        """What each rank owns: the cost of updating it, the elements and the bytes. Not collective; equal on all ranks.

        Costs are in the units of ``cost``: multiply-adds and elements, milliseconds, or the function's own.
        """
        return self._partition.shares()

    @property
    def step_hooks(self) -> StepHooks | None:
        """The ShardedDataParallel that sends the updated parameters, as long as there is one."""
        return None if self._hooks is None else self._hooks()

    def _attach(self, hooks: StepHooks | None) -> None:
        """Let the data parallel module that reduces gradients to their owners send parameters too; None: OSS does."""
        self._hooks = None if hooks is None else weakref.ref(hooks)  # it holds this optimizer
        self._steps.reset()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. The new parameters go to the ranks whose own cost least. Collective.

        Raises ValueError, adding nothing, for parameters given twice, refused by the class, or unknown to an attached
        data parallel module. RuntimeError on every rank if the new parameters differ between ranks, and on the others
        if one has an error.
        """
        if not self._built:  # called by torch's constructor: owners are assigned for all groups at once
            self._add_as_it_is(param_group)
            return
        count = len(self.param_groups)
        try:
            with self._agreement("OSS.add_param_group()") as agreement:
                self._add_as_it_is(param_group)
                if self.step_hooks is not None:
                    self.step_hooks._check_new(self.param_groups[-1]["params"])
                self._complete(count)
                self._verify(agreement)
            known = self._partition.active
            active = [*known, *self._partition.trainable()[len(known) :]]
            owners, state = self._agree_on_owners(active)
        except Exception:
            del self.param_groups[count:]
            self._partition.set_groups(self.param_groups)
            del self._partition.costs[len(self._partition.params) :]
            raise
        self._apply(owners, active, state)

    def _add_as_it_is(self, group: dict[str, Any]) -> None:
        """Add a group without the defaults of a class that may not be its own."""
        defaults, self.defaults = self.defaults, {}
        try:
            super().add_param_group(group)
        finally:
            self.defaults = defaults
        self._partition.set_groups(self.param_groups)

    def _complete(self, number: int) -> Optimizer:
        """Fill in the options that the group's class sets; an optimizer of that class."""
        group = self.param_groups[number]
        check_factory(self._optimizers.factory(group), f"'optim' of group {number}")
        first = sum(len(before["params"]) for before in self.param_groups[:number])
        return self._optimizers.complete(group, self._partition.names[first:])

    def refresh_trainable(self) -> None:
        """Call after parameters were frozen or thawed (``requires_grad``). Collective.

        Newly trainable parameters without an owner go to the ranks whose own cost least. All others stay where they
        are, with their state; frozen ones are left out of steps until they are thawed and this is called again.
        """
        with self._agreement("OSS.refresh_trainable()") as agreement:
            self._verify(agreement)
        active = self._partition.trainable()
        owners, state = self._agree_on_owners(active)
        self._apply(owners, active, state)

    def assign_owners(self, indices: Iterable[int]) -> list[int]:
        """Assign owners to those parameters that have none, frozen ones too, so that state can be loaded for them.

        Call it with the same indices on all ranks. Returns the indices of all parameters of this rank.
        """
        self._has_begun = True
        chosen = {*indices}
        wanted = [on or index in chosen for index, on in enumerate(self._partition.active)]
        owners, state = self._find_owners(wanted)
        self._apply(owners, self._partition.active, state)
        return self._partition.owned()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's parameters, then exchange updated parameters between all ranks. Collective.

        The closure is called once on every rank, and its loss returned. RuntimeError for a sparse gradient, and for the
        gradient of a parameter that was thawed without `refresh_trainable`.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        refuse_local_sgd()
        self._partition.check_gradients()
        if skips_step(self, self._partition.params, self.process_group, sharded=self.step_hooks is not None):
            return loss
        self._consolidated, self._has_begun = None, True
        written = self._written.in_step(self.param_groups)
        with written, self._changing(), self._partition.frozen_gradients_hidden():
            self._steps.run(self._sender, self._memory)
        return loss

    @property
    def _sender(self) -> Sender:
        return self._own_sender if self.step_hooks is None or self._half else self.step_hooks._gather_of(self)

    @property
    def _memory(self) -> list[torch.Tensor]:
        """Flat memory of this rank's parameters."""
        messages = () if self.step_hooks is None else self.step_hooks._gather_of(self).messages
        return [flat for message in messages if message.owner == self.rank for flat in message.memory]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A context in which this rank's parameters change, and all ranks get them."""
        self._own_sender.follow_dtypes()
        hooks = self.step_hooks
        if hooks is None and self._hooks is not None:
            raise RuntimeError(
                f"rank {self.rank}: the ShardedDataParallel that averaged this OSS's gradients no longer exists. Keep "
                "a reference to it for as long as the optimizer steps."
            )
        if hooks is not None:
            hooks.synchronize()
            hooks._gather_of(self).attach()
        copy_options(self.param_groups, self._optimizers.param_groups)
        yield
        copy_options(self._optimizers.param_groups, self.param_groups)

    def __getattr__(self, name: str) -> Callable[[], None]:
        """``train`` and ``eval`` of an optimizer that has them (schedule-free ones). Collective."""
        optimizers = self.__dict__.get("_optimizers")
        if name in ("train", "eval") and optimizers is not None and optimizers.switches(name):
            return partial(self._switch, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        with self._changing():
            self._steps.switch(mode, self._sender)

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; return the norm before. Collective.

        Equals ``torch.nn.utils.clip_grad_norm_`` over all parameters, up to rounding; each rank measures the gradients
        of its own parameters. The norm is a scalar of the parameters' dtype, at least float32. RuntimeError for a
        non-finite norm if ``error_if_nonfinite``, ValueError for ``norm_type`` <= 0.
        """
        params, group = self._partition.params, self.process_group
        grads = [grad for grad in (params[index].grad for index in self._partition.owned()) if grad is not None]
        dtype = reduce(torch.promote_types, (p.dtype.to_real() for p in params if p.requires_grad), torch.float32)
        device = params[0].device if params else message_device(group)
        alike = {"max_norm": max_norm, "error_if_nonfinite": error_if_nonfinite}
        norm = sharded_norm(grads, norm_type, dtype, group, device, self._partition.check_gradients, alike)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the gradients' norm of order {norm_type} is {norm.item()}, so it can't be clipped")
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach)
        return norm

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gather the whole state on the CPU of one rank (of the group), where `state_dict` then returns it. Collective.

        One owner sends at a time. The next step drops the state. ValueError for a rank outside of the group.
        """
        with self._agreement("OSS.consolidate_state_dict()") as agreement:
            if not 0 <= recipient_rank < self.world_size:
                raise ValueError(
                    f"recipient_rank must be a rank of the group (0 to {self.world_size - 1}), got {recipient_rank}"
                )
            agreement.verify(options={"recipient_rank": str(recipient_rank)})
        self._consolidated = gather_state(self._optimizers.state, self._partition, recipient_rank, self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in the form of ``optim``'s own state_dict over all parameters, on one rank.

        RuntimeError on a rank that has not got it through `consolidate_state_dict` since the last step; one alone has
        it.
        """
        if self.world_size == 1:
            return self._state_dict_of(self.state)
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank} has no consolidated state: call consolidate_state_dict() on all ranks after step(), "
                "and state_dict() on its recipient_rank (0 by default); local_state_dict() is this rank's part"
            )
        return self._state_dict_of(self._consolidated)

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in the form of `state_dict`; "sharded_params" lists the parameters' indices.

        For torch.distributed.checkpoint (see `torchddp.optim.load_checkpoint`), or for one file per rank.
        """
        return {**self._state_dict_of(self._optimizers.state), "sharded_params": self._partition.owned()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a whole state: saved by OSS on any number of ranks, or by ``optim`` without OSS.

        Collective: all ranks load the same state. A rank may load a `local_state_dict` that covers all its parameters.
        ValueError, changing nothing, for the state of another model or for a part with other parameters.
        """
        with self._agreement("OSS.load_state_dict()") as agreement:
            saved = dict(state_dict)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, saved)
                saved = saved if changed is None else changed
            by_index, others = self._check_state(saved)
            part = saved.get("sharded_params")
            missing = [] if part is None else sorted({*self._partition.owned()} - {*part})
            if missing:
                raise ValueError(
                    f"this is another rank's part of the state: {self._partition.names[missing[0]]} is not in it. Load "
                    "a whole state (consolidate_state_dict) or a checkpoint (torchddp.optim.load_checkpoint)"
                )
            gained = [] if part is not None else [i for i in sorted(by_index) if self._partition.owners[i] is None]
            options = {"state for frozen parameters": in_words([self._partition.names[i] for i in gained])}
            agreement.verify(options={**options, **options_in_words(saved["param_groups"])})
        mine = self._partition.owned() if part is not None else self.assign_owners(by_index)
        self._load({**others, **{index: by_index[index] for index in mine if index in by_index}}, saved["param_groups"])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _check_state(self, state_dict: Mapping[str, Any]) -> tuple[dict[int, Any], dict[Any, Any]]:
        optimizers, names = self._optimizers, [kind.__qualname__ for kind in self._optimizers.kinds]
        return check_state(
            state_dict, names, self.param_groups, self._partition, optimizers.state, optimizers.are_torchs
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError("an OSS can't be copied or pickled: it belongs to a process group; use its state_dict")

    def _agreement(self, call: str = "") -> Agreement:
        return Agreement("OSS", self.process_group, call=call)

    def _verify(self, agreement: Agreement) -> None:
        options = {
            "optim": getattr(self._optim, "__qualname__", in_words(self._optim)),
            "cost": str(self._costs),
            "broadcast_buffer_size": str(self._bucket_numel),
            "broadcast_fp16": str(self._half),
        }
        classes = {
            f"'optim' of group {number}": self._optimizers.kind(group).__qualname__
            for number, group in enumerate(self.param_groups)
            if "optim" in group
        }
        agreement.verify(self._partition.describe(), {**options, **classes, **options_in_words(self.param_groups)})

    def _agree_on_owners(self, wanted: list[bool]) -> tuple[list[int | None], dict[torch.Tensor, Any]]:
        """As `_find_owners`, with new costs. Collective: an error of one rank is one of all."""
        with self._agreement() as agreement:
            partition = self._partition
            partition.costs = self._costs.of(self.param_groups, self._optimizers, self._agreement())
            found = self._find_owners(wanted)
            priced = zip(partition.names, partition.costs, strict=True)
            agreement.verify([f"{name}, of cost {cost:g}" for name, cost in priced])
        return found

    def _find_owners(self, wanted: list[bool]) -> tuple[list[int | None], dict[torch.Tensor, Any]]:
        """The owners once each wanted parameter has one, and the initial state of those that are new to this rank."""
        others = () if self.step_hooks is None else self.step_hooks._partitions_beside(self)
        owners = self._partition.plan(wanted, others)
        return owners, self._initial_state(owners, {*self._partition.owned()})

    def _initial_state(self, owners: list[int | None], known: set[int]) -> dict[torch.Tensor, Any]:
        params = self._partition.params
        new = {params[index] for index, owner in enumerate(owners) if owner == self.rank and index not in known}
        return self._optimizers.initial_state(self.param_groups, new)

    @staticmethod
    def balance_together(optimizers: Sequence[OSS]) -> None:
        """Assign owners anew, balanced over all optimizers, to the parameters of those that have not begun."""
        parts = [optimizer._partition for optimizer in optimizers]
        begun = [optimizer._has_begun for optimizer in optimizers]
        if len(parts) == 1 or all(begun):
            return
        known = [part.owners if fixed else [None] * len(part.params) for part, fixed in zip(parts, begun, strict=True)]
        wanted = [[owner is not None for owner in part.owners] for part in parts]
        for optimizer, owners in zip(optimizers, plan_together(parts, known, wanted), strict=True):
            if not optimizer._has_begun:
                state = optimizer._initial_state(owners, set())
                optimizer._optimizers.state.clear()
                optimizer._apply(owners, optimizer._partition.active, state)

    def _apply(self, owners: list[int | None], active: list[bool], state: dict[torch.Tensor, Any]) -> None:
        """Make these the owners, with the initial state of parameters that are new to this rank. Collective."""
        changed = self._partition.assign(owners, active)
        params = self._partition.params
        mine = {params[index] for index in self._partition.owned()}
        for group in self.param_groups[len(self._optimizers.param_groups) :]:
            self._optimizers.add(group)
        for inner, group in zip(self._optimizers.param_groups, self.param_groups, strict=True):
            inner["params"] = [param for param in group["params"] if param in mine]
        self._optimizers.state.update(state)
        self._written.possible = not self._optimizers.are_torchs
        self._own_sender = GroupSender(self._partition, self._bucket_numel, self.process_group, self._half)
        self._state_replaced()
        if changed and self.step_hooks is not None:
            self.step_hooks._owners_changed()

    def _state_replaced(self) -> None:
        self.state = self._optimizers.state
        self._steps.reset()
        self._consolidated = None

    def _state_dict_of(self, state: Mapping[Any, Any]) -> dict[str, Any]:
        live, self.state = self.state, state  # type: ignore[assignment]
        try:
            whole = super().state_dict()
        finally:
            self.state = live
        for saved, group in zip(whole["param_groups"], self.param_groups, strict=True):
            if "optim" in saved:
                saved["optim"] = self._optimizers.kind(group).__qualname__
        return whole

    def _load(self, state: Mapping[Any, Any], saved_groups: list[dict[str, Any]]) -> None:
        index_of = {param: index for index, param in enumerate(self._partition.params)}
        groups = [
            {**options_of(saved), "params": [index_of[param] for param in inner["params"]]}
            for saved, inner in zip(saved_groups, self._optimizers.param_groups, strict=True)
        ]
        self._optimizers.load_state_dict(state, groups)
        self._has_begun = True
        self._state_replaced()
        for group, inner, saved in zip(self.param_groups, self._optimizers.param_groups, saved_groups, strict=True):
            own = {key: group[key] for key in OWN_KEYS if key in group}
            named = {key: saved[key] for key in ("param_names",) if key in saved}
            group.clear()
            group.update({**options_of(inner), **own, **named})


def _resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError("OSS needs a process group: call torch.distributed.init_process_group first")
    resolved = dist.group.WORLD if group is None else group
    if not isinstance(resolved, dist.ProcessGroup) or dist.get_rank(resolved) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group that was given to OSS")
    return resolved
