"""What a ShardedDataParallel decides for its session: owners of gradients, their buckets, and where parameters lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchddp import _C
from torchddp.ddp.options import DDPOptions
from torchddp.ddp.session import ReducerPolicy, ReducerSession
from torchddp.sharded import optimizer_checks
from torchddp.sharded.oss import OSS
from torchddp.sharded.parameter_sync import ParameterGather
from torchddp.sharded.pending_parameters import PendingModules


class ShardedPolicy(ReducerPolicy):
    """Each gradient is reduced to its owner alone; the owner's updated parameters go to all ranks after a step.

    Attributes:
        gathers: one for each optimizer, over the flat memory that its parameters lie in.

    Args:
        buffer_numel: elements of the largest bucket, unless one gradient is larger.
        sends_states: give all ranks rank 0's parameters and buffers when the transport is opened.
        overlap_wanted: whether updated parameters should travel while the next forward runs.
    """

    _reducer: _C.Reducer  # once the session is open

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
        self.gathers: list[ParameterGather] = []
        self._module = module
        self._buffer_numel, self._sends_states, self._overlap_wanted = buffer_numel, sends_states, overlap_wanted
        self._pending: list[PendingModules] = []
        self._transport: _C.Transport | None = None  # the same one for all reducers of the module

    # --- what the session asks ---

    def transport(self, session: ReducerSession) -> _C.Transport:
        """Collective where it is opened: the first time, and on another kind of device."""
        if self._transport is None:
            self._transport = session.connect(collective=True)
            if self._sends_states:
                buffers = session.options.sends_buffers_at_init
                self._transport = session.sync_states(self._transport, 0, buffers=buffers)
        self._lay_out(session, self._transport)
        return self._transport

    def owners(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        return optimizer_checks.owners_of(parameters, self.optimizers)

    def bucket_caps(
        self, options: DDPOptions, parameters: Sequence[torch.Tensor], transport: _C.Transport
    ) -> tuple[list[int], int]:
        caps, solo_bytes = super().bucket_caps(options, parameters, transport)
        largest = max(1, self._buffer_numel * max(p.element_size() for p in parameters))
        return [min(cap, largest) for cap in caps], min(solo_bytes, largest) if solo_bytes else 0

    def opened(self, session: ReducerSession) -> None:
        if session.reducer.transport is not self._transport:  # some rank had no room in shared memory
            self._transport = session.reducer.transport
            self._lay_out(session, self._transport)
        self._reducer = session.reducer
        for pending in self._pending if self.overlaps else []:
            pending.install_hooks()

    def _lay_out(self, session: ReducerSession, transport: _C.Transport) -> None:
        """Moves each optimizer's parameters to flat memory of their owner's."""
        frozen = {p for optimizer in self.optimizers for p in optimizer.param_to_rank if not p.requires_grad}
        for gather in self.gathers:
            for chunk in gather.chunks:
                chunk.detach(frozen)
        self.gathers, self._pending = [], []
        for optimizer in self.optimizers:
            owners = {p: rank for p, rank in optimizer.param_to_rank.items() if p.requires_grad}
            gather = ParameterGather(owners, transport, session.wait_limit)
            self.gathers.append(gather)
            self._pending.append(PendingModules(self._module, [chunk.params for chunk in gather.chunks]))

    # --- updated parameters ---

    @property
    def overlaps(self) -> bool:
        """Whether updated parameters travel while the next forward runs."""
        # Ranks that share memory copy for themselves, and who waits for their copying must know that they are at it.
        return self._overlap_wanted and self._transport is not None and self._transport.reaches_any_memory

    def send_updated(self, number: int) -> None:
        """Collective: this rank's parameters of the n-th optimizer to all."""
        gather, pending = self.gathers[number], self._pending[number]
        gather.start(self._reducer)
        if self.overlaps:
            pending.wait_on_access(gather.wait)
        else:
            gather.finish()

    def synchronize(self) -> None:
        """Until all updated parameters are there."""
        for gather, pending in zip(self.gathers, self._pending, strict=True):
            gather.finish()
            pending.resolve()

    # --- changes ---

    def remove_hooks(self) -> None:
        """From the module: it is laid out anew."""
        for pending in self._pending:
            pending.remove_hooks()

    def forget_transport(self) -> None:
        """The model has moved to another kind of device: the next session opens another."""
        self._transport = None

    def release(self) -> None:
        """The optimizers step by themselves again, and the module has no hooks of ours."""
        self.remove_hooks()
        for optimizer in self.optimizers:
            optimizer.detach()
        self.gathers, self._pending = [], []
