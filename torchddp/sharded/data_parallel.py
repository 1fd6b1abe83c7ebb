"""ShardedDataParallel: each gradient reduced to the one rank that owns it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchddp.ddp.module import DistributedDataParallel
from torchddp.ddp.options import TransportChoice, ZeroWeights
from torchddp.sharded.oss import OSS
from torchddp.sharded.parameter_sync import StepHooks, is_compiling
from torchddp.sharded.policy import ShardedPolicy, agreed_optimizers


class ShardedDataParallel(DistributedDataParallel):
    """Data parallel training with sharded gradients and optimizer state (ZeRO stage 2, Rajbhandari et al. 2020).

        optimizer = torchddp.optim.OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
        model = torchddp.ShardedDataParallel(model, optimizer)
        loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()

    Buckets hold the gradients of one owner each and are reduced to it while backward goes on; the other ranks let go of
    theirs at once, so that after backward ``.grad`` is None but on the owner. ``optimizer.step()`` updates the owner's
    parameters and sends them to all, from flat memory into flat memory (parameters become views of it): while the next
    forward runs, each module waiting for its own (DeAR, Zhang et al. 2023), or within the step over shared memory,
    where this rank's own processor would do the copying anyhow. Results are those of DistributedDataParallel.

    Args:
        module: the model. Its parameters keep their identity, and get other memory.
        sharded_optimizer: the `torchddp.optim.OSS` of its trainable parameters, or a list of several.
        process_group: the ranks, those of the optimizers; by default all.
        broadcast_buffers: rank 0's buffers before each forward.
        sync_models_at_startup: rank 0's parameters and buffers now.
        reduce_buffer_size: elements of the largest message with gradients, unless one gradient is larger; 0: a message
            for each. Buckets are smaller than that where the transport likes small ones.
        auto_refresh_trainable: notice in forward that parameters were frozen or thawed, and `refresh_trainable`. Each
            rank looks at its own: all must have changed the same.
        reduce_fp16: float32 gradients travel as float16, after the division by the world size: half as many bytes, and
            three digits. Sums are rounded to float16 too: over shared memory and gloo once, elsewhere by the backend.
        transport, timeout, stall_report_s, find_unused_parameters, static_graph, device_ids, weighted, zero_weights: as
            for DistributedDataParallel.
        overlap_gather: False: the step ends when all ranks have the updated parameters. Otherwise they travel while the
            next forward runs, unless memory is shared.

    With ``overlap_gather`` a parameter is waited for when it is read through its module (or this class):
    ``module.weight``, ``parameters()``, ``state_dict()``, forward. A tensor kept from before is not: `synchronize`.

    Memory per rank, beside the model: 1/W of the gradients after backward (during it also those on their way), 1/W of
    the optimizer's state. The constructor and every synchronised backward, step and `refresh_trainable` are collective.

    Raises:
        TypeError: an optimizer that is no OSS.
        ValueError: an optimizer over other parameters than the module's, a parameter in two optimizers or in none, an
            optimizer of another process group, a wrong buffer size.
        RuntimeError: ranks whose models or owners differ; a module with sparse gradients; no parameter requires grad.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sharded_optimizer: OSS | list[OSS],
        process_group: Any = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        *,
        transport: TransportChoice = "auto",
        timeout: datetime.timedelta | None = None,
        stall_report_s: float | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        device_ids: list[Any] | None = None,
        overlap_gather: bool = True,
        weighted: bool = False,
        zero_weights: ZeroWeights = "raise",
    ) -> None:
        if isinstance(reduce_buffer_size, bool) or not isinstance(reduce_buffer_size, int) or reduce_buffer_size < 0:
            raise ValueError(f"reduce_buffer_size must be a number of elements, 0 or more, got {reduce_buffer_size!r}")
        if not dist.is_initialized():
            raise RuntimeError("ShardedDataParallel needs a process group: call init_process_group first")
        optimizers = agreed_optimizers(module, sharded_optimizer, process_group or dist.group.WORLD)
        # Read while torch's constructor runs: a plain attribute only.
        self._policy = self._shards = ShardedPolicy(
            module,
            optimizers,
            buffer_numel=reduce_buffer_size,
            reduce_dtype=torch.float16 if reduce_fp16 else None,
            sends_states=sync_models_at_startup,
            overlap_wanted=overlap_gather,
        )
        self._refreshing = False
        super().__init__(
            module,
            device_ids=device_ids,
            process_group=process_group,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            transport=transport,
            timeout=timeout,
            stall_report_s=stall_report_s,
            forward_sync_buffers=broadcast_buffers,
            weighted=weighted,
            zero_weights=zero_weights,
            auto_refresh_trainable=auto_refresh_trainable,
        )
        for number, optimizer in enumerate(optimizers):
            hooks = StepHooks(
                check_new=self._check_new,
                owned_buffers=partial(self._shards.owned_buffers, number),
                before_step=self.synchronize,
                after_step=partial(self._shards.send_updated, number),
                owners_changed=self._owners_changed,
            )
            optimizer.attach(hooks)

    # --- parameters on their way ---

    @property
    def overlap_gather(self) -> bool:
        """Whether updated parameters travel while the next forward runs."""
        return self._shards.overlaps

    def synchronize(self) -> None:
        """Until all updated parameters are there. Needed before reading a tensor that was not got from a module."""
        self._shards.synchronize()

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if is_compiling():
            self.synchronize()
        return super()._forward(*inputs, **kwargs)

    def unwrap(self) -> torch.nn.Module:
        """Takes the module out: its parameters get memory of their own, and no hooks are left on it. Returns it.

        For the end of training: this object can't be used any more. Gradients are dropped; the optimizers can still be
        saved (`consolidate_state_dict`). Not collective, but all ranks must have done as many steps: updated
        parameters that are on their way are waited for.
        """
        try:
            self.synchronize()
        finally:
            self.observers.close()
            self.session.close()
            self._shards.release()
            for param in self._module_parameters:
                param.grad = None
                param.data = param.data.clone()
        return self.module

    # --- frozen and thawed ---

    def refresh_trainable(self) -> None:
        """After parameters were frozen or thawed: finds owners, and buckets without what is frozen. Collective.

        Errors are those of the base class. New parameters go to an optimizer by its ``add_param_group``, which calls
        this.
        """
        self._refreshing = True
        try:
            for optimizer in self._shards.optimizers:
                optimizer.refresh_trainable()
        finally:
            self._refreshing = False
        super().refresh_trainable()

    def _check_new(self, params: list[torch.Tensor]) -> None:
        known = set(self.module.parameters())
        if strangers := sum(param not in known for param in params):
            raise ValueError(
                f"{strangers} of {len(params)} new parameters are not those of the ShardedDataParallel's module"
            )

    def _owners_changed(self) -> None:
        """An optimizer has new parameters, or new owners."""
        session = self.session
        if not self._refreshing and (
            session.has_changed() or self._shards.owners(session.parameters) != [spec.owner for spec in session.specs]
        ):
            super().refresh_trainable()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """``to``, ``half``, ``cuda`` and the like. Collective."""
        self.synchronize()
        super()._apply(fn, recurse)
        device = next(iter(self._module_parameters)).device
        self.device, self.device_type = device, device.type
        super().refresh_trainable()
        return self

    # --- gradients ---

    def reduce(self) -> None:
        """Reduces the gradients there are to their owners, as a synchronised backward would. Collective.

        For gradients that were accumulated under `no_sync`. A rank without a gradient counts as one with zeros.
        """
        super().reduce()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        raise RuntimeError(
            "ShardedDataParallel takes no communication hook: hooks reduce to all ranks. reduce_fp16=True halves "
            "what is sent"
        )

    def replan(self) -> NoReturn:
        raise RuntimeError("ShardedDataParallel does not plan its buckets: reduce_buffer_size bounds them")

    def _update_process_group(self, new_process_group: Any) -> NoReturn:
        raise RuntimeError(
            "the ranks of a ShardedDataParallel can't change: each holds a share of the optimizer's state. Save it "
            "(consolidate_state_dict, or torch.distributed.checkpoint) and load it on the new ranks"
        )

    def join(self, *arguments: Any, **more: Any) -> NoReturn:
        raise RuntimeError(
            "ShardedDataParallel can't be used with join(): a rank that has run out of inputs still owns parameters. "
            "Give all ranks the same number of batches"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a ShardedDataParallel can't be copied or pickled: it belongs to its optimizers. Copy its .module instead"
        )
