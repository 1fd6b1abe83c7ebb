"""ShardedDataParallel's decisions for its session: gradient owners, buckets, and parameter memory.

Its optimizers must assign an owner to each trainable parameter of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.ddp.model import wrapped_inside
from torchddp.ddp.session import ReducerPolicy, ReducerSession
from torchddp.errors import listed
from torchddp.sharded.oss import OSS
from torchddp.sharded.parameter_sync import ParameterGather
from torchddp.transport.agreement import Agreement


class ShardedPolicy(ReducerPolicy):
    """Each gradient is reduced to its owner only; after a step, the owner's updated parameters go to all ranks."""

    _reducer: _C.Reducer  # set once the session is open
    who = "ShardedDataParallel"
    ranks_compare_changes = False

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: list[OSS],
        *,
        buffer_numel: int,
        reduce_dtype: torch.dtype | None,
        sends_states: bool,
        overlap_wanted: bool,
    ) -> None:
        self.reduce_dtype = reduce_dtype
        self.optimizers = optimizers
        self.gathers: list[ParameterGather] = []  # one per optimizer
        self._module = module
        self.sends_states = sends_states
        self._buffer_numel, self._overlap_wanted = buffer_numel, overlap_wanted
        self._transport: _C.Transport | None = None

    # --- called by the session ---

    def compared(self) -> dict[str, str]:
        return {
            "reduce_buffer_size": str(self._buffer_numel),
            "reduce_fp16": str(self.reduce_dtype is not None),
            "sync_models_at_startup": str(self.sends_states),
            "overlap_gather": str(self._overlap_wanted),
        }

    def transport(self, session: ReducerSession, before: ReducerSession | None) -> _C.Transport:
        self._transport = super().transport(session, before)
        self._lay_out(session, self._transport)
        return self._transport

    def owners(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Each parameter's owner. RuntimeError if one has none, because it was thawed without `refresh_trainable`."""
        found = {param: rank for optimizer in self.optimizers for param, rank in optimizer.param_to_rank.items()}
        unowned = [f"parameter {i} (shape {list(p.shape)})" for i, p in enumerate(parameters) if p not in found]
        if unowned:
            raise RuntimeError(
                f"{len(unowned)} trainable parameters have no owner: {listed(unowned, 8)}. Call refresh_trainable() of "
                "the ShardedDataParallel on all ranks after thawing parameters"
            )
        return [found[param] for param in parameters]

    def bucket_caps(self, session: ReducerSession, transport: _C.Transport) -> tuple[list[int], int]:
        caps, solo_bytes = super().bucket_caps(session, transport)
        largest = max(1, self._buffer_numel * max(p.element_size() for p in session.parameters))
        return [min(cap, largest) for cap in caps], min(solo_bytes, largest) if solo_bytes else 0

    def opened(self, session: ReducerSession) -> None:
        if session.reducer.transport is not self._transport:  # some rank had no room in shared memory
            self._transport = session.reducer.transport
            self._lay_out(session, self._transport)
        self._reducer = session.reducer
        for gather in self.gathers if self.overlaps else []:
            gather.install_hooks()

    def closing(self, session: ReducerSession) -> None:
        self.synchronize()
        for gather in self.gathers:
            gather.remove_hooks()

    def _lay_out(self, session: ReducerSession, transport: _C.Transport) -> None:
        """Move each optimizer's parameters to flat memory of their owners."""
        frozen = {p for optimizer in self.optimizers for p in optimizer.param_to_rank if not p.requires_grad}
        for gather in self.gathers:
            for chunk in gather.chunks:
                chunk.detach(frozen)
        self.gathers = []
        for optimizer in self.optimizers:
            owners = {p: rank for p, rank in optimizer.param_to_rank.items() if p.requires_grad}
            self.gathers.append(ParameterGather(self._module, owners, transport, session.wait_limit))

    # --- updated parameters ---

    @property
    def overlaps(self) -> bool:
        """Whether updated parameters are sent while the next forward runs."""
        # Over shared memory, the ranks' own CPUs do the copying, so there is nothing to overlap.
        return self._overlap_wanted and self._transport is not None and self._transport.reaches_any_memory

    def owned_buffers(self, number: int) -> list[torch.Tensor]:
        return self.gathers[number].owned_buffers

    def send_updated(self, number: int) -> None:
        """Collective: send this rank's parameters of the n-th optimizer to all."""
        self.gathers[number].run(self._reducer, overlaps=self.overlaps)

    def synchronize(self) -> None:
        """Wait for all updated parameters."""
        for gather in self.gathers:
            gather.finish()

    # --- changes ---

    def release(self) -> None:
        """Let the optimizers step on their own again."""
        for optimizer in self.optimizers:
            optimizer._attach(None)
        self.gathers = []


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
            raise ValueError(
                "the optimizer already belongs to another ShardedDataParallel: make a new one for this module, and "
                "load the state into it"
            )
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
                    raise ValueError(
                        f"parameter '{names[param]}' is in optimizer {held_by[param]} and in optimizer {number}: each "
                        "must belong to one"
                    )
                held_by[param] = number
        if unknown:
            raise ValueError(
                f"optimizer {number} holds {len(unknown)} parameters that are not the module's: "
                f"{listed(unknown, 8)}. Build it from the parameters of the wrapped module"
            )
    missing = [n for p, n in names.items() if p.requires_grad and p not in held_by and n not in skipped]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are in no optimizer: {listed([repr(n) for n in missing], 8)}. Give "
            "them to one, or freeze them (requires_grad=False)"
        )
