"""DiLoCo: many local steps, then one outer optimizer step on their average displacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchddp.averaging.flat import DEFAULT_CAP_MB, FlatBucket, FlatMeans, Wire, check_wire
from torchddp.averaging.optimizers import OptimizerWrapper
from torchddp.averaging.parameters import (
    Named,
    ParamSource,
    broadcast_from_first,
    group_or_default,
    named_buffers,
    named_parameters,
    sum_dtype,
    verify_same,
)
from torchddp.traffic import Traffic

OuterFactory = Callable[[list[nn.Parameter]], Optimizer]


class GlobalWeights:
    """A copy of the parameters in at least fp32, and the outer optimizer, which steps on the ranks' mean displacement
    from it.

    Equal on all ranks as long as all apply the same means.
    """

    def __init__(self, local: Named, make_optimizer: OuterFactory) -> None:
        self._local = local
        self.weights = {name: nn.Parameter(p.detach().to(sum_dtype(p.dtype), copy=True)) for name, p in local.items()}
        self.optimizer = make_optimizer(list(self.weights.values()))
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"outer_optimizer must return an optimizer, got {type(self.optimizer).__name__}")

    def pack_moved(self, bucket: FlatBucket, flat: torch.Tensor) -> None:
        """This rank's outer gradient: its parameters' displacement, with the sign of a gradient."""
        views = bucket.views(flat)
        for view, name in zip(views, bucket.named, strict=True):
            # Relative to what the ranks received: rounding to 16 bits is not a displacement.
            view.copy_(self.weights[name].detach().to(bucket.dtype))
        torch._foreach_sub_(views, [local.detach().to(flat.dtype) for local in bucket.named.values()])

    def step(self, bucket: FlatBucket, flat: torch.Tensor, alpha: float = 0.0) -> None:
        """Update the weights of a bucket with their outer gradient, which the optimizer may overwrite.

        The rank's own parameters become ``alpha`` times themselves plus 1 - ``alpha`` times these.
        """
        for name, view in zip(bucket.named, bucket.views(flat), strict=True):
            self.weights[name].grad = view
        self.optimizer.step()  # skips parameters without a gradient
        for name in bucket.named:
            self.weights[name].grad = None
            local, weight = self._local[name].detach(), self.weights[name].detach()
            local.copy_(weight if alpha == 0 else torch.lerp(weight, local.to(weight.dtype), alpha))

    def state_dict(self) -> dict[str, Any]:
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return {"weights": weights, "outer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["weights"]
        if different := sorted(set(saved) ^ set(self.weights)):
            names = ", ".join(map(repr, different[:3]))
            raise ValueError(f"the state dict is of another model: only one of the two has {names}")
        for name, weight in self.weights.items():
            weight.copy_(saved[name])
        self.optimizer.load_state_dict(state_dict["outer"])


class OuterLoop(OptimizerWrapper):
    """Shared by DiLoCo and Streaming DiLoCo: global weights, a step count, and saving both."""

    def __init__(
        self,
        params: ParamSource,
        optimizer: Optimizer,
        sync_every: int,
        outer_lr: float,
        outer_momentum: float,
        nesterov: bool,
        outer_optimizer: OuterFactory | None,
        wire: Wire | None,
        process_group: dist.ProcessGroup | None,
        options: str = "",  # what else must be equal on all ranks
    ) -> None:
        make_outer = _outer_factory(outer_optimizer, outer_lr, outer_momentum, nesterov)
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
        alike = f"{sync_every=}, {outer_lr=}, {outer_momentum=}, {nesterov=}, wire={wire}{options}"
        verify_same(self._named, self.process_group, type(self).__name__, [alike])
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
                raise TypeError(f"parameter '{name}' is {param.dtype}: outer steps need real parameters")

    @property
    def outer_optimizer(self) -> Optimizer:
        """Updates the global weights; its learning rate may be scheduled, equally on all ranks."""
        return self._global.optimizer

    @property
    def global_weights(self) -> Named:
        """By name: the weights that all ranks agree on, in at least fp32. Read-only."""
        return {name: weight.detach() for name, weight in self._global.weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and, under the method's name, the step, the global weights and the outer
        optimizer's state.

        Between synchronizations parameters differ between ranks, so each rank saves its own model and optimizer.
        """
        return {**self._inner.state_dict(), self._key: {"step": self.steps, **self._global.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores training exactly, together with the model's state, in any order. ValueError for the state of another
        optimizer or model."""
        saved = self._saved_part(state_dict)
        self._global.load_state_dict(saved)
        self._inner.load_state_dict(state_dict)
        self.steps = saved["step"]


def _outer_factory(
    outer_optimizer: OuterFactory | None, outer_lr: float, outer_momentum: float, nesterov: bool
) -> OuterFactory:
    if isinstance(outer_optimizer, Optimizer):
        raise TypeError(
            "outer_optimizer must be a function, which gets a copy of the model's parameters: "
            "lambda params: torch.optim.SGD(params, lr=0.7)"
        )
    if outer_optimizer is not None:
        if not callable(outer_optimizer):
            raise TypeError(f"outer_optimizer must be a function, got {type(outer_optimizer).__name__}")
        return outer_optimizer
    if not outer_lr > 0:
        raise ValueError(f"outer_lr must be above 0, got {outer_lr}")
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum must be at least 0 and below 1, got {outer_momentum}")
    use_nesterov = nesterov and outer_momentum > 0
    return lambda params: torch.optim.SGD(params, lr=outer_lr, momentum=outer_momentum, nesterov=use_nesterov)


class DiLoCo(OuterLoop):
    """Any optimizer, with an outer step after every ``sync_every`` steps (DiLoCo, Douillard et al. 2023).

    Example:

        inner = torch.optim.AdamW(module.parameters(), lr=1e-3)
        optimizer = torchddp.averaging.DiLoCo(module, inner, sync_every=50)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(module(batch)).backward()
            optimizer.step()  # every 50th also takes an outer step

    The outer gradient is how far the parameters have moved since the last outer step, averaged over the ranks. The
    outer optimizer applies it to a copy of the parameters, and all ranks continue from there. The state of their inner
    optimizers stays local. Pass the bare module, or train a `DistributedDataParallel` under ``no_sync()``.

    Args:
        params: a module, or its parameters (with names, if errors should name them): all that ``optimizer`` steps.
        optimizer: the inner optimizer, which takes the local steps: any torch optimizer whose steps are not collective.
        sync_every: the number of inner steps between outer steps (the paper's H).
        outer_lr, outer_momentum, nesterov: options of the outer optimizer, SGD.
        outer_optimizer: a function that takes parameters and returns the outer optimizer, to use another one than SGD.
        wire: the format in which outer gradients are sent: "fp32", "bf16", "fp16", "int8" or "int4" (in blocks with one
            scale each). Sums are always in fp32. None: the parameter's own format if it has 16 bits, otherwise fp32.
        buffers: average floating-point buffers too, at each synchronization; ``params`` must be a module.
        process_group: the ranks to average over; None: the default process group.
        bucket_cap_mb: the size in MiB of a message, and of the buffer kept for it.

    Construction is collective: parameters become those of rank 0 (load checkpoints afterwards). So is every
    ``sync_every``-th step, after which all ranks hold the same parameters, bit for bit.

    Held per rank: the parameters in fp32, the outer momentum, one message.

    Raises TypeError and ValueError for invalid options, parameters and optimizers, and RuntimeError on all ranks if
    parameters or ``sync_every`` differ between ranks. `step` raises TransportError.

    Attributes:
        steps: steps that the inner optimizer has taken.
        traffic: the bytes of the last synchronization; see `torchddp.traffic`.
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
        wire: Wire | None = None,
        *,
        buffers: bool = False,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
    ) -> None:
        averaged_buffers = named_buffers(params, buffers)
        outer = (outer_lr, outer_momentum, nesterov, outer_optimizer)
        super().__init__(params, optimizer, sync_every, *outer, wire, process_group)
        self._means = FlatMeans(self._named, self.process_group, "DiLoCo", bucket_cap_mb, wire)
        self._buffers = None
        if averaged_buffers:
            verify_same(averaged_buffers, self.process_group, "DiLoCo")
            self._buffers = FlatMeans(averaged_buffers, self.process_group, "DiLoCo", bucket_cap_mb)

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        if self.steps % self.sync_every == 0:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Take an outer step now, whatever the count; for example at the end of training. Collective."""
        for bucket, mean in self._means.run(self.steps, self._global.pack_moved):
            self._global.step(bucket, mean)
        self.traffic = self._means.traffic
        if self._buffers is not None:
            self._buffers.average(self.steps)
