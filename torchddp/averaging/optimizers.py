"""Optimizers that wrap another one and share its groups and state, such as post-local SGD."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.optim import Optimizer

from torchddp.traffic import Traffic


class OptimizerWrapper(Optimizer, abc.ABC):
    """Steps the inner optimizer, then does what the averaging method requires. Schedulers and hooks accept either."""

    param_groups = property(attrgetter("_inner.param_groups"))
    state = property(attrgetter("_inner.state"))
    defaults = property(attrgetter("_inner.defaults"))

    def __init__(self, optimizer: Optimizer) -> None:
        who, given = type(self).__name__, type(optimizer).__name__
        if isinstance(optimizer, type):
            given = f"a class: write {optimizer.__name__}(params)"
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{who} needs a torch.optim.Optimizer, got {given}")
        if hasattr(optimizer, "process_group"):
            raise ValueError(f"{who} can't wrap {given}, whose steps are collective: here, ranks step independently")
        self._inner = optimizer
        for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            name = f"_optimizer_{kind}_hooks"  # shared: hooks on either see the state saved and loaded
            setattr(self, name, getattr(optimizer, name))
        super().__setstate__({})  # as a constructor does, but without groups of its own

    @property
    def optim(self) -> Optimizer:
        """The inner optimizer."""
        return self._inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled, as it belongs to a process group; use its state_dict"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the inner optimizer, then do what is due. Collective in some steps. Raises TransportError."""
        loss = self._inner.step() if closure is None else self._inner.step(closure)
        self.after_step()
        return loss

    @abc.abstractmethod
    def after_step(self) -> None:
        """Count a step of the inner optimizer, and do what is due. `step` calls it.

        Call it yourself if you step the inner optimizer (`optim`), as with a GradScaler, which may skip a step on one
        rank alone: ``scaler.step(optimizer.optim)``, then ``optimizer.after_step()``.
        """


class PostLocalSGD(OptimizerWrapper):
    """Any optimizer, with parameters averaged after its steps (post-local SGD, Lin et al. 2020).

    Example:

        averager = torchddp.averaging.PeriodicAverager(module, period=8)
        adamw = torch.optim.AdamW(module.parameters(), lr=1e-3)
        optimizer = torchddp.averaging.PostLocalSGD(adamw, averager)
        loss_of(module(batch)).backward()
        optimizer.step()  # averages when the averager's period is over

    ``optimizer``: any of torch's whose steps are not collective; its state (momentum) stays local. ``averager``: one of
    this package's or of torch's. Replaces torch's PostLocalSGDOptimizer, with the same ``state_dict``.

    Construction is not collective; `step` is when the averager averages. Raises TypeError, ValueError for others.
    """

    def __init__(self, optimizer: Optimizer, averager: ModelAverager) -> None:
        if not isinstance(averager, ModelAverager):
            raise TypeError(f"averager must be one of this package's or torch's, got {type(averager).__name__}")
        super().__init__(optimizer)
        self.averager = averager

    @property
    def traffic(self) -> Traffic | None:
        """Bytes of the last average; None with a torch averager."""
        return getattr(self.averager, "traffic", None)

    def after_step(self) -> None:
        self.averager.average_parameters(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; all ranks then set up the next average again."""
        self._inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, with the averager's step count as ``"step"``."""
        return {**self._inner.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts the state of torch's PostLocalSGDOptimizer too. Without ``"step"``, warns and counts from 0."""
        self._inner.load_state_dict(state_dict)
        if "step" not in state_dict:
            warnings.warn("the state dict has no 'step' of an averager: counting from 0", stacklevel=2)
        self.averager.step = state_dict.get("step", 0)
