"""Optimizers that wrap another one and share its groups and state: post-local SGD, SlowMo."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.optim import Optimizer

from torchddp.averaging.averagers import PeriodicAverager
from torchddp.averaging.parameters import Named, broadcast_from_first, named_parameters, sum_dtype, verify_same
from torchddp.traffic import Traffic


class OptimizerWrapper(Optimizer, abc.ABC):
    """Steps the inner optimizer, then does what the averaging method requires.

    Learning rate schedulers and hooks accept either optimizer.
    """

    _key: str  # of what the method itself saves in the state dict
    param_groups: Any = property(attrgetter("_inner.param_groups"))
    state: Any = property(attrgetter("_inner.state"))
    defaults: Any = property(attrgetter("_inner.defaults"))

    def __init__(self, optimizer: Optimizer) -> None:
        who, given = type(self).__name__, type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{who} needs a torch.optim.Optimizer, got {given}")
        if hasattr(optimizer, "process_group"):
            raise ValueError(f"{who} can't wrap {given}, whose steps are collective: here, ranks step independently")
        self._inner = optimizer
        # Shared, so that hooks on either optimizer see the state saved and loaded.
        self._optimizer_state_dict_pre_hooks = optimizer._optimizer_state_dict_pre_hooks
        self._optimizer_state_dict_post_hooks = optimizer._optimizer_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = optimizer._optimizer_load_state_dict_pre_hooks
        self._optimizer_load_state_dict_post_hooks = optimizer._optimizer_load_state_dict_post_hooks
        super().__setstate__({})  # as a constructor does, but without groups of its own

    @property
    def optim(self) -> Optimizer:
        """The inner optimizer."""
        return self._inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: it has a process group. Copy its state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer, then do what is due. Collective in some steps. Raises TransportError."""
        loss = self._inner.step() if closure is None else self._inner.step(closure)
        self.after_step()
        return loss

    @abc.abstractmethod
    def after_step(self) -> None:
        """Count a step of the inner optimizer, and do what is due. `step` calls it.

        Call it yourself if you step the inner optimizer (`optim`) directly, as with a GradScaler, which may skip a step
        on one rank alone: ``scaler.step(optimizer.optim)``, then ``optimizer.after_step()``.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: the method's state belongs to the constructor's parameters."""
        raise RuntimeError(f"{type(self).__name__} can't add parameters: create it after adding all groups")

    def _saved_part(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The method's own part of a state dict. ValueError for the state of another optimizer."""
        if self._key not in state_dict:
            raise ValueError(f"the state dict has no '{self._key}': it was saved by another optimizer")
        part: dict[str, Any] = state_dict[self._key]
        return part


class PostLocalSGD(OptimizerWrapper):
    """Any optimizer, with parameters averaged after its steps (post-local SGD, Lin et al. 2020).

    Example:

        averager = torchddp.averaging.PeriodicAverager(module, period=8)
        adamw = torch.optim.AdamW(module.parameters(), lr=1e-3)
        optimizer = torchddp.averaging.PostLocalSGD(adamw, averager)
        loss_of(module(batch)).backward()
        optimizer.step()  # averages when the averager's period is over

    The optimizer's own state (momentum) stays local. Replaces torch's PostLocalSGDOptimizer, with the same
    ``state_dict``: the inner optimizer's, and ``"step"``.

    Args:
        optimizer: any torch optimizer whose steps are not collective.
        averager: `PeriodicAverager`, `HierarchicalAverager` or one of torch's.

    Construction is not collective. `step` is collective in the steps in which the averager averages. Raises TypeError
    and ValueError for optimizers and averagers that it can't wrap.
    """

    def __init__(self, optimizer: Optimizer, averager: ModelAverager) -> None:
        if not isinstance(averager, ModelAverager):
            raise TypeError(
                f"averager must be a PeriodicAverager, a HierarchicalAverager or one of torch's, got "
                f"{type(averager).__name__}"
            )
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


class SlowMo(OptimizerWrapper):
    """Any optimizer, with an average and a step of slow momentum every ``period`` steps (SlowMo, Wang et al. 2020).

    Example:

        sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer = torchddp.averaging.SlowMo(sgd, period=12)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(module(batch)).backward()
            optimizer.step()  # every 12th also averages

    After every ``period`` steps (a round), the parameters x are averaged. Then, with x0 the parameters at the start of
    the round, g the learning rate, u the slow momentum, and coefficients beta and alpha: u = beta * u + (x0 - x) / g; x
    = x0 - alpha * g * u. The inner optimizer's own state stays local.

    Args:
        optimizer: any torch optimizer whose steps are not collective.
        period: steps of a round, at least 1; or a `PeriodicAverager`, whose period, process group, buffers and
            ``warmup_steps`` then apply. The first round begins after the warm-up, with an average. Unlike the averager
            alone, it averages at the end of a round.
        slow_momentum: beta, in [0, 1). With 0 and ``slow_lr=1`` this is periodic averaging.
        slow_lr: alpha, above 0.
        process_group: the ranks to average over; None: the default process group. Can't be combined with an averager.

    Construction is collective: parameters become those of rank 0. So is every ``period``-th step, after which all ranks
    hold the same parameters, bit for bit. Learning rates must be the same on all ranks. A parameter group whose
    learning rate is 0 at that step is averaged, and its momentum doesn't change.

    Held per rank: the parameters at the start of the round, the slow momentum (fp32 or wider), one message.

    Raises TypeError and ValueError for invalid options and optimizers.
    """

    _key = "slowmo"

    def __init__(
        self,
        optimizer: Optimizer,
        period: int | PeriodicAverager,
        slow_momentum: float = 0.5,
        slow_lr: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 <= slow_momentum < 1:
            raise ValueError(f"slow_momentum must be at least 0 and below 1, got {slow_momentum}")
        if not slow_lr > 0:
            raise ValueError(f"slow_lr must be above 0, got {slow_lr}")
        super().__init__(optimizer)
        if any("lr" not in group for group in optimizer.param_groups):
            raise ValueError(f"SlowMo needs learning rates, and {type(optimizer).__name__} has a group without 'lr'")
        if isinstance(period, PeriodicAverager):
            if process_group is not None:
                raise ValueError("the averager already has a process group: leave out process_group")
            self.averager = period
        else:
            self.averager = PeriodicAverager(optimizer.param_groups, period, process_group=process_group)
        self.slow_momentum, self.slow_lr = slow_momentum, slow_lr
        self._named = named_parameters(optimizer.param_groups)
        options = [f"slow_momentum={slow_momentum}, slow_lr={slow_lr}"]
        verify_same(self._named, self.averager.process_group, "SlowMo", options)
        broadcast_from_first(self._named, self.averager.process_group)
        self._begin: Named = {name: p.detach().clone() for name, p in self._named.items()}
        self._slow: Named = {
            name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, sum_dtype(p.dtype)), requires_grad=False)
            for name, p in self._named.items()
        }

    @property
    def traffic(self) -> Traffic:
        """Bytes of the last average."""
        return self.averager.traffic

    @torch.no_grad()
    def after_step(self) -> None:
        averager = self.averager
        averager.step += 1
        done = averager.step - averager.warmup_steps
        if done < 0 or done % averager.period != 0:
            return
        # Before the first round too, because ranks that trained separately would keep different starting points.
        averager.average_now(self._inner.param_groups)
        if done > 0:
            self._step_slowly()
        for name, param in self._named.items():
            self._begin[name].copy_(param)

    def _step_slowly(self) -> None:
        name_of = {id(p): name for name, p in self._named.items()}
        for group in self._inner.param_groups:
            lr = float(group["lr"])
            names = [name_of[id(p)] for p in group["params"] if id(p) in name_of]
            for name in names if lr != 0 else []:
                param, slow = self._named[name], self._slow[name]
                begin = self._begin[name].to(slow.dtype)
                slow.mul_(self.slow_momentum).add_((begin - param) / lr)
                param.copy_(begin.sub_(slow, alpha=self.slow_lr * lr))

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and, under "slowmo", the step, the slow momentum and where the round began.

        Between averages parameters differ between ranks, so each rank saves its own model and optimizer.
        """
        own = {"step": self.averager.step, "momentum": dict(self._slow), "begin": dict(self._begin)}
        return {**self._inner.state_dict(), self._key: own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores training exactly, together with the model's state. ValueError for the state of another optimizer."""
        saved = self._saved_part(state_dict)
        self._inner.load_state_dict(state_dict)
        self.averager.step = saved["step"]
        for kept, key in ((self._slow, "momentum"), (self._begin, "begin")):
            for name, tensor in kept.items():
                tensor.copy_(saved[key][name])
