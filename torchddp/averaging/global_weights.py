"""The weights that ranks agree on in DiLoCo, and the outer optimizer that moves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchddp import _torch
from torchddp.averaging.flat import FlatBucket
from torchddp.averaging.parameters import Named, sum_dtype

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
        _torch.foreach_sub_(views, [local.detach().to(flat.dtype) for local in bucket.named.values()])

    def step(self, bucket: FlatBucket, flat: torch.Tensor, alpha: float) -> None:
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


def outer_factory(
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
