"""The weights that all ranks agree on beside those they train, and the outer optimizer that moves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchddp.averaging.flat import FlatBucket
from torchddp.averaging.parameters import Named, sum_dtype

OuterFactory = Callable[[list[nn.Parameter]], Optimizer]


def make_outer_factory(
    outer_optimizer: OuterFactory | None, outer_lr: float, outer_momentum: float, nesterov: bool
) -> OuterFactory:
    """``outer_optimizer``, or SGD with these options. TypeError and ValueError for what is no good."""
    if isinstance(outer_optimizer, Optimizer):
        raise TypeError(
            "outer_optimizer must be a function from parameters to an optimizer, for it moves a copy of the model's: "
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


class GlobalWeights:
    """A copy of the parameters in at least fp32, and the optimizer that is given what ranks have moved away from it.

    Equal on all ranks as long as all are given the same means.
    """

    def __init__(self, local: Named, make_optimizer: OuterFactory) -> None:
        self._local = local
        self.weights = {name: nn.Parameter(p.detach().to(sum_dtype(p.dtype), copy=True)) for name, p in local.items()}
        self.optimizer = make_optimizer(list(self.weights.values()))
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"outer_optimizer must return an optimizer, got {type(self.optimizer).__name__}")

    def pack_moved(self, bucket: FlatBucket, flat: torch.Tensor) -> None:
        """This rank's outer gradient: how far its parameters have moved, with the sign of a gradient."""
        views = bucket.views(flat)
        names = list(bucket.named)
        for view, name in zip(views, names, strict=True):
            # As the ranks have got it: rounding to 16 bits is no movement.
            view.copy_(self.weights[name].detach().to(bucket.dtype))
        torch._foreach_sub_(views, [bucket.named[name].detach().to(flat.dtype) for name in names])

    def step(self, bucket: FlatBucket, flat: torch.Tensor) -> None:
        """Moves the weights of a bucket by their outer gradient, which the optimizer may overwrite."""
        names = list(bucket.named)
        for name, view in zip(names, bucket.views(flat), strict=True):
            self.weights[name].grad = view
        self.optimizer.step()  # leaves alone what has no gradient
        for name in names:
            self.weights[name].grad = None

    def write(self, names: Sequence[str], alpha: float = 0.0) -> None:
        """The ranks' own parameters become ``alpha`` of themselves and 1 - ``alpha`` of these."""
        for name in names:
            local, weight = self._local[name].detach(), self.weights[name].detach()
            local.copy_(weight if alpha == 0 else torch.lerp(weight, local.to(weight.dtype), alpha))

    def state_dict(self) -> dict[str, Any]:
        """Weights by name, and the outer optimizer's state."""
        return {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "outer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave. ValueError for the weights of another model."""
        saved = state_dict["weights"]
        if different := sorted(set(saved) ^ set(self.weights)):
            raise ValueError(
                f"the state dict is of another model: {', '.join(map(repr, different[:3]))} is in one of them"
            )
        for name, weight in self.weights.items():
            weight.copy_(saved[name])
        self.optimizer.load_state_dict(state_dict["outer"])
