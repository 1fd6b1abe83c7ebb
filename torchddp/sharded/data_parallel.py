"""ShardedDataParallel: each gradient is reduced to the one rank that owns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchddp import _C, _torch
from torchddp.ddp import refresh
from torchddp.ddp.checks import Checks, ChecksChoice, chosen
from torchddp.ddp.former_names import accepts_former_names
from torchddp.ddp.model import check_is_group, check_module, device_of
from torchddp.ddp.module import OPTIONS, DistributedDataParallel
from torchddp.ddp.options import TransportChoice
from torchddp.ddp.session import ReducerPolicy, ReducerSession
from torchddp.ddp.wrapper import wrapped_inside
from torchddp.durations import Duration
from torchddp.errors import check_flag, listed
from torchddp.sharded.oss import OSS
from torchddp.sharded.parameter_sync import ParameterGather
from torchddp.sharded.partition import ParameterPartition
from torchddp.transport.agreement import Agreement


@dataclass(kw_only=True, eq=False)
class ShardedPolicy(ReducerPolicy):
    """Each gradient is reduced to its owner only; after a step, the owner's updated parameters go to all ranks."""

    who = "ShardedDataParallel"
    ranks_compare_changes = False

    module: torch.nn.Module
    optimizers: list[OSS]
    buffer_numel: int
    reduce_dtype: torch.dtype | None
    sends_states: bool
    overlap_wanted: bool
    gathers: dict[Optimizer, ParameterGather] = field(default_factory=dict)
    _transport: _C.Transport | None = None

    def compared(self) -> dict[str, str]:
        return {
            "reduce_buffer_size": str(self.buffer_numel),
            "reduce_fp16": str(self.reduce_dtype is not None),
            "sync_models_at_startup": str(self.sends_states),
            "overlap_gather": str(self.overlap_wanted),
        }

    def transport(self, session: ReducerSession, before: ReducerSession | None) -> _C.Transport:
        self._transport = super().transport(session, before)
        self._lay_out(session, self._transport)
        return self._transport

    def owners(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Each parameter's owner. RuntimeError if one has none, because it was thawed without `refresh_trainable`."""
        found = {param: rank for optimizer in self.optimizers for param, rank in optimizer.param_to_rank.items()}
        if unowned := [f"parameter {i} (shape {list(p.shape)})" for i, p in enumerate(parameters) if p not in found]:
            raise RuntimeError(
                f"{len(unowned)} trainable parameters have no owner: {listed(unowned, 8)}. Call refresh_trainable() of "
                "the ShardedDataParallel on all ranks after thawing parameters, and an optimizer's add_param_group() "
                "for new ones, such as those that load_state_dict(assign=True) puts in place of others"
            )
        return [found[param] for param in parameters]

    def bucket_caps(self, session: ReducerSession, transport: _C.Transport) -> tuple[list[int], int]:
        caps, solo_bytes = super().bucket_caps(session, transport)
        largest = max(1, self.buffer_numel * max(p.element_size() for p in session.parameters))
        return [min(cap, largest) for cap in caps], min(solo_bytes, largest) if solo_bytes else 0

    def opened(self, session: ReducerSession) -> None:
        if session.reducer.transport is not self._transport:  # some rank had no room in shared memory
            self._transport = session.reducer.transport
            self._lay_out(session, self._transport)
        for gather in self.gathers.values():
            gather.connect(session.reducer, overlaps=self.overlaps)

    def closing(self, session: ReducerSession) -> None:
        self.synchronize()
        for gather in self.gathers.values():
            gather.disconnect()

    def _lay_out(self, session: ReducerSession, transport: _C.Transport) -> None:
        """Move each optimizer's parameters to flat memory of their owners."""
        frozen = {p for optimizer in self.optimizers for p in optimizer.param_to_rank if not p.requires_grad}
        for gather in self.gathers.values():
            for chunk in gather.messages:
                chunk.detach(frozen)
        self.gathers = {}
        for optimizer in self.optimizers:
            owners = {p: rank for p, rank in optimizer.param_to_rank.items() if p.requires_grad}
            self.gathers[optimizer] = ParameterGather(self.module, owners, transport, session.wait_limit)

    @property
    def overlaps(self) -> bool:
        """Whether updated parameters are sent while the next forward runs."""
        # Over shared memory there is nothing to overlap: see `ParameterGather.needs_this_core`.
        return self.overlap_wanted and self._transport is not None and self._transport.reaches_any_memory

    def synchronize(self) -> None:
        for gather in self.gathers.values():
            gather.synchronize()

    def release(self) -> None:
        for optimizer in self.optimizers:
            optimizer._attach(None)
        self.gathers = {}


def agreed_optimizers(module: torch.nn.Module, given: Any, group: Any, agreement: Agreement) -> list[OSS]:
    """Collective: the optimizers as a list, whose owners the ranks agree on."""
    optimizers = _check_optimizers(given, group)
    _check_coverage(module, optimizers)
    owners = {param: rank for optimizer in optimizers for param, rank in optimizer.param_to_rank.items()}
    lines = [
        f"'{name}' {list(param.shape)}, {f'owned by rank {owners[param]}' if param in owners else 'frozen'}"
        for name, param in module.named_parameters()
    ]
    if wrapped_inside(module):
        raise ValueError("the module is, or contains, a DistributedDataParallel over these parameters: wrap once")
    agreement.verify(lines)
    return optimizers


def _check_optimizers(given: OSS | Sequence[OSS], process_group: dist.ProcessGroup) -> list[OSS]:
    """As a list. TypeError if one is not an OSS, ValueError if one has another group or is given twice."""
    optimizers = [given] if isinstance(given, OSS) or not isinstance(given, Sequence) else list(given)
    if not optimizers:
        raise ValueError("ShardedDataParallel needs an optimizer: torchddp.optim.OSS, or a list of them")
    for optimizer in optimizers:
        if not isinstance(optimizer, OSS):
            raise TypeError(
                "ShardedDataParallel needs optimizers of class torchddp.optim.OSS, got "
                f"{type(optimizer).__qualname__}: use OSS(params, optim=torch.optim.AdamW, lr=1e-3)"
            )
        if optimizer.step_hooks is not None:
            raise ValueError("the optimizer already belongs to another ShardedDataParallel: make a new one")
        if optimizer.process_group is not process_group:
            raise ValueError(
                f"the optimizer is sharded over another process group ({optimizer.world_size} ranks) than the module "
                f"({process_group.size()} ranks): pass the same group to both"
            )
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise ValueError("an optimizer is given twice")
    return optimizers


def _check_coverage(module: torch.nn.Module, optimizers: Sequence[OSS]) -> None:
    """ValueError unless each trainable parameter of the module is in exactly one optimizer, and no other is in any."""
    names = {param: name for name, param in module.named_parameters()}
    skipped = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    held_by: dict[torch.Tensor, int] = {}
    for number, optimizer in enumerate(optimizers):
        unknown = []
        for group_number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param not in names:
                    unknown.append(f"parameter {place} of group {group_number} (shape {list(param.shape)})")
                elif param in held_by:
                    both = f"optimizers {held_by[param]} and {number}"
                    raise ValueError(f"parameter '{names[param]}' is in {both}: each must belong to one")
                held_by[param] = number
        if unknown:
            raise ValueError(
                f"optimizer {number} holds parameters that are not the module's: {listed(unknown, 8)}. Make it from "
                "module.parameters(), after whatever replaces them"
            )
    if missing := [n for p, n in names.items() if p.requires_grad and p not in held_by and n not in skipped]:
        listing = listed([repr(n) for n in missing], 8)
        raise ValueError(f"{len(missing)} trainable parameters are in no optimizer: {listing}. Add or freeze them")


class ShardedDataParallel(DistributedDataParallel):
    """Data parallel training with sharded gradients and optimizer state (ZeRO stage 2, Rajbhandari et al. 2020).

    Example:

        optimizer = torchddp.optim.OSS(module.parameters(), optim=torch.optim.AdamW, lr=1e-3)
        model = torchddp.ShardedDataParallel(module, optimizer)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()

    Each bucket holds gradients of one owner and is reduced to it while backward runs. The other ranks free theirs at
    once, so after backward ``.grad`` is None except on the owner. ``optimizer.step()`` updates the owner's parameters
    and sends them to all ranks from flat buffers (parameters become views of these): during the next forward, with each
    module waiting for its own parameters (DeAR, Zhang et al. 2023), or, over shared memory, within the step, because
    there the rank's own CPU does the copying anyway. Results equal those of DistributedDataParallel.

    Args:
        module: the model. Its parameters keep their identity but move to other memory.
        sharded_optimizer: the `torchddp.optim.OSS` of its trainable parameters, or a list of several.
        process_group: the ranks to train on, the same as the optimizers'; default: all ranks.
        broadcast_buffers: send rank 0's buffers before each forward.
        sync_models_at_startup: start from rank 0's parameters and buffers.
        reduce_buffer_size: elements of the largest gradient message, unless a single gradient is larger; 0: one message
            per gradient. Buckets are smaller where the transport prefers small ones.
        auto_refresh_trainable: detect in forward that parameters were frozen or thawed, and call `refresh_trainable`.
            Each rank checks its own parameters; they must change in the same way on all ranks.
        reduce_fp16: send float32 gradients as float16, after dividing by the world size: half the bytes, about three
            decimal digits. Sums are rounded to float16 too: once over shared memory and gloo, else as the backend does.
        transport, timeout, find_unused_parameters, static_graph, device_ids, weighted: as for DistributedDataParallel.
        checks: ``stall_report``, ``zero_weights``, ``traps``, ``stragglers`` of :class:`torchddp.Checks`, or ``"off"``.
        overlap_gather: False: a step returns once all ranks have the updated parameters. Otherwise they are sent while
            the next forward runs, unless memory is shared.

    With ``overlap_gather``, reading a parameter through its module (or this class) waits for it: ``module.weight``,
    ``parameters()``, ``state_dict()``, forward. A tensor obtained earlier does not wait: see `synchronize`.

    Clip with ``optimizer.clip_grad_norm(max_norm)``; torch's ``clip_grad_norm_`` sees only this rank's gradients.

    Memory per rank besides the model: 1/W of the gradients after backward (during it, also those in transit) and 1/W of
    the optimizer's state. The constructor and every synchronized backward, step and `refresh_trainable` are collective.

    Raises:
        TypeError: an optimizer is not an OSS.
        ValueError: the optimizers and the module have different parameters, a parameter is in two optimizers or none,
            an optimizer has another process group, or the buffer size is invalid.
        RuntimeError: models or owners differ between ranks, gradients are sparse, or no parameter requires grad.
    """

    _ddp_policy: ShardedPolicy

    @accepts_former_names()
    def __init__(
        self,
        module: torch.nn.Module,
        sharded_optimizer: OSS | list[OSS],
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        *,
        transport: TransportChoice = "auto",
        timeout: Duration | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        device_ids: list[Any] | None = None,
        overlap_gather: bool = True,
        weighted: bool = False,
        checks: ChecksChoice = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("ShardedDataParallel needs a process group: call init_process_group first")
        group = dist.group.WORLD if process_group is None else process_group
        check_is_group(group)
        assert group is not None
        given = locals()
        with Agreement("ShardedDataParallel", group, device_of(module)) as agreement:
            check_module(module, "ShardedDataParallel")
            for name in ("broadcast_buffers", "sync_models_at_startup", "reduce_fp16", "overlap_gather"):
                check_flag(name, given[name])
            if type(reduce_buffer_size) is not int or reduce_buffer_size < 0:
                raise ValueError(
                    f"reduce_buffer_size must be a number of elements, 0 or more; got {reduce_buffer_size!r}"
                )
            _check_checks(chosen(checks))
            optimizers = agreed_optimizers(module, sharded_optimizer, group, agreement)
        OSS.balance_together(optimizers)
        # Read while torch's constructor runs, so it must be a plain attribute.
        self._ddp_policy = ShardedPolicy(
            module=module,
            optimizers=optimizers,
            buffer_numel=reduce_buffer_size,
            reduce_dtype=torch.float16 if reduce_fp16 else None,
            sends_states=sync_models_at_startup,
            overlap_wanted=overlap_gather,
        )
        self._refreshing = False
        options = {name: given[name] for name in OPTIONS if name in given and name != "broadcast_buffers"}
        super().__init__(module, forward_sync_buffers=broadcast_buffers, **options)
        for optimizer in optimizers:
            optimizer._attach(self)

    @property
    def overlap_gather(self) -> bool:
        """Whether updated parameters are sent while the next forward runs."""
        return any(gather.overlaps for gather in self._ddp_policy.gathers.values())

    def synchronize(self) -> None:
        """Wait for all updated parameters. Needed before reading a tensor that was not obtained from a module."""
        self._ddp_policy.synchronize()

    def _forward_of_step(self, *inputs: object, **kwargs: object) -> object:
        if _torch.is_compiling():
            self.synchronize()
        return super()._forward_of_step(*inputs, **kwargs)

    def unwrap(self) -> torch.nn.Module:
        """Return the module, with its parameters in their own memory and all hooks removed.

        For the end of training: this object can't be used afterwards. Gradients are dropped; the optimizers can still
        be saved (`consolidate_state_dict`). Not collective, but all ranks must have done the same number of steps,
        because it waits for updated parameters in transit.
        """
        try:
            self.synchronize()
        finally:
            self.observers.close()
            self.session.close()
            self._ddp_policy.release()
            for param in self._module_parameters:
                param.grad = None
                param.data = param.data.clone()
        module: torch.nn.Module = self.module
        return module

    def refresh_trainable(self) -> None:
        """Update owners and buckets after parameters were frozen or thawed. Collective.

        Raises the base class's errors. Give new parameters to an optimizer's ``add_param_group``, which calls this.
        """
        refresh.refresh_trainable(self, change_owners=self._refresh_owners)

    def _refresh_owners(self) -> None:
        self._refreshing = True
        try:
            for optimizer in self._ddp_policy.optimizers:
                optimizer.refresh_trainable()
        finally:
            self._refreshing = False

    def _check_new(self, params: list[torch.Tensor]) -> None:
        known = set(self.module.parameters())
        if unknown := sum(param not in known for param in params):
            raise ValueError(f"{unknown} of {len(params)} new parameters are not in the ShardedDataParallel's module")

    def _gather_of(self, optimizer: Optimizer) -> ParameterGather:
        return self._ddp_policy.gathers[optimizer]

    def _partitions_beside(self, optimizer: Optimizer) -> list[ParameterPartition]:
        return [other._partition for other in self._ddp_policy.optimizers if other is not optimizer]

    def _owners_changed(self) -> None:
        """An optimizer has new parameters or new owners."""
        session = self.session
        if not self._refreshing and (
            session.has_changed()
            or self._ddp_policy.owners(session.parameters) != [spec.owner for spec in session.specs]
        ):
            super().refresh_trainable()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedDataParallel:
        """``to``, ``half``, ``cuda`` and the like. Collective."""
        self.synchronize()
        super()._apply(fn, recurse)
        device = next(iter(self._module_parameters)).device
        self.device, self.device_type = device, device.type
        super().refresh_trainable()
        return self

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        raise RuntimeError("ShardedDataParallel takes no communication hooks; reduce_fp16=True halves the bytes sent")

    def replan(self) -> NoReturn:
        raise RuntimeError("ShardedDataParallel does not plan its buckets: reduce_buffer_size bounds them")

    def update_process_group(self, new_process_group: object) -> NoReturn:
        raise RuntimeError(
            "the ranks of a ShardedDataParallel can't change: each holds a share of the optimizer's state. Save it "
            "(consolidate_state_dict, or torch.distributed.checkpoint) and load it on the new ranks"
        )

    def join(self, *arguments: object, **more: object) -> NoReturn:
        raise RuntimeError(
            "ShardedDataParallel can't be used with join(): a rank that has run out of inputs still owns parameters. "
            "Give all ranks the same number of batches"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a ShardedDataParallel can't be copied or pickled: it belongs to its optimizers. Copy its .module instead"
        )


def _check_checks(checks: Checks) -> None:
    for name in ("nonfinite", "parameters_every", "gradient_stats"):
        if value := getattr(checks, name):
            raise ValueError(
                f"Checks({name}={value!r}) doesn't work with ShardedDataParallel, whose averages are on one rank each; "
                "stall_report, zero_weights, traps and stragglers do"
            )
