"""DiLoCo: many local steps, then one step of an outer optimizer on what they have moved on average."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchddp.averaging.flat import DEFAULT_CAP_MB, FlatAverage, FlatMeans, check_wire
from torchddp.averaging.global_weights import GlobalWeights, OuterFactory, make_outer_factory
from torchddp.averaging.parameters import (
    Named,
    ParamSource,
    broadcast_from_first,
    group_or_default,
    named_buffers,
    named_parameters,
    verify_same,
)
from torchddp.averaging.wrapper import OptimizerWrapper
from torchddp.traffic import Traffic

__all__ = ["DiLoCo"]


class OuterLoop(OptimizerWrapper):
    """What DiLoCo and Streaming DiLoCo share: global weights, a count of steps, and how both are saved."""

    _key: str  # of the state dict

    def __init__(
        self,
        params: ParamSource,
        optimizer: Optimizer,
        sync_every: int,
        make_outer: OuterFactory,
        wire: str | None,
        process_group: dist.ProcessGroup | None,
        options: str,
    ) -> None:
        super().__init__(optimizer)
        if sync_every < 1:
            raise ValueError(f"sync_every must be at least 1 step, got {sync_every}")
        self.process_group = group_or_default(process_group)
        self.sync_every = sync_every
        self.steps = 0
        self.traffic = Traffic(0, 0)
        self._wire = wire
        self._named = named_parameters(params)
        self._check(optimizer)
        check_wire(wire, self._named)
        verify_same(self._named, self.process_group, type(self).__name__, [f"sync_every={sync_every}, {options}"])
        broadcast_from_first(self._named, self.process_group)
        self._global = GlobalWeights(self._named, make_outer)

    def _check(self, optimizer: Optimizer) -> None:
        mine = {id(p) for p in self._named.values()}
        for name, param in named_parameters(optimizer.param_groups).items():
            if id(param) not in mine:
                raise ValueError(
                    f"the optimizer steps {name} (shape {list(param.shape)}), which is not among the parameters that "
                    "are averaged"
                )
        for name, param in self._named.items():
            if param.is_complex():
                raise TypeError(f"parameter '{name}' is {param.dtype}: outer steps take real parameters")

    @property
    def outer_optimizer(self) -> Optimizer:
        """It moves the global weights; its learning rate may be scheduled, equally on all ranks."""
        return self._global.optimizer

    @property
    def global_weights(self) -> Named:
        """By name: what all ranks agree on, in at least fp32. To be read only."""
        return {name: weight.detach() for name, weight in self._global.weights.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: global weights belong to the parameters of the constructor."""
        raise RuntimeError(f"{type(self).__name__} takes no parameters later: make it after all groups were added")

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under the method's name the step, the global weights and the outer optimizer's.

        Between synchronisations parameters differ: each rank then saves its own model and optimizer.
        """
        return {**self._inner.state_dict(), self._key: {"step": self.steps, **self._global.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Exact, together with the model's, in any order. ValueError if another optimizer or model was saved."""
        if self._key not in state_dict:
            raise ValueError(f"the state dict has no '{self._key}': it was saved by another optimizer")
        self._global.load_state_dict(state_dict[self._key])
        self._inner.load_state_dict(state_dict)
        self.steps = state_dict[self._key]["step"]


class DiLoCo(OuterLoop):
    """Any optimizer, with an outer step after every ``sync_every`` steps (DiLoCo, Douillard et al. 2023).

        optimizer = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=1e-3), sync_every=50)
        for batch in loader:
            model(batch).backward(); optimizer.step(); optimizer.zero_grad()

    The outer gradient is what the parameters have moved since the last outer step, averaged over the ranks. The outer
    optimizer moves a copy of the parameters by it, and the ranks go on from there; their inner optimizer keeps its
    state, which stays local. Give it the bare module, or train a `DistributedDataParallel` under ``no_sync()``.

    Args:
        params: a module, or its parameters (with names, if errors should name them): all that ``optimizer`` steps.
        optimizer: the inner one; any of torch's, but for those whose steps are collective.
        sync_every: inner steps between outer ones (H).
        outer_lr, outer_momentum, nesterov: of the outer SGD.
        outer_optimizer: another one instead: a function from parameters to optimizer.
        wire: how outer gradients travel: "fp32", "bf16", "fp16", "int8" or "int4" (blocks with a scale each), summed
            in fp32 in any case. None: those of 16-bit parameters in their own format, others as they are.
        buffers: average floating-point buffers too, at each synchronisation; ``params`` must be a module.
        process_group: None: the default one.
        bucket_cap_mb: MiB of one message, and of the memory that is held for it.

    Construction is collective: parameters become those of rank 0 (load checkpoints afterwards). So is every
    ``sync_every``-th step, after which all ranks hold the same parameters, bit for bit.

    Held per rank: the parameters in fp32, the outer momentum, one message.

    Raises TypeError and ValueError for options, parameters and optimizers that are no good, RuntimeError on all ranks
    where parameters or ``sync_every`` differ; `step` raises TransportError.

    Attributes:
        steps: of the inner optimizer, so far.
        traffic: bytes of the last synchronisation.
    """

    _key = "diloco"

    def __init__(
        self,
        params: ParamSource,
        optimizer: Optimizer,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_optimizer: OuterFactory | None = None,
        wire: str | None = None,
        *,
        buffers: bool = False,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
    ) -> None:
        if buffers and not isinstance(params, nn.Module):
            raise TypeError(f"buffers=True needs a module as params, got {type(params).__name__}")
        module_buffers = named_buffers(params) if buffers and isinstance(params, nn.Module) else {}
        make_outer = make_outer_factory(outer_optimizer, outer_lr, outer_momentum, nesterov)
        options = f"outer_lr={outer_lr}, outer_momentum={outer_momentum}, nesterov={nesterov}, wire={wire}"
        super().__init__(params, optimizer, sync_every, make_outer, wire, process_group, options)
        self._means = FlatMeans(self._named, self.process_group, "DiLoCo", bucket_cap_mb, wire)
        self._buffers = None
        if module_buffers:
            verify_same(module_buffers, self.process_group, "DiLoCo")
            self._buffers = FlatAverage(module_buffers, self.process_group, "DiLoCo", bucket_cap_mb)

    @torch.no_grad()
    def after_step(self) -> None:
        """See `OptimizerWrapper.after_step`."""
        self.steps += 1
        if self.steps % self.sync_every == 0:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Collective. An outer step now, whatever the count: at the end of training, for instance."""
        for bucket, mean in self._means.run(self.steps, self._global.pack_moved):
            self._global.step(bucket, mean)
            self._global.write(list(bucket.named))
        self.traffic = self._means.traffic
        if self._buffers is not None:
            self._buffers.run(self.steps)
