"""An optimizer around another one, whose groups and state it shows as its own."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NoReturn

from torch.optim import Optimizer


class OptimizerWrapper(Optimizer, abc.ABC):
    """Steps the inner optimizer, then does what the averaging method asks for after a step.

    Learning rate schedulers and hooks take either of the two.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _check(optimizer, type(self).__name__)
        self._inner = optimizer
        # One state: hooks of either side see it saved and loaded.
        self._optimizer_state_dict_pre_hooks = optimizer._optimizer_state_dict_pre_hooks
        self._optimizer_state_dict_post_hooks = optimizer._optimizer_state_dict_post_hooks
        self._optimizer_load_state_dict_pre_hooks = optimizer._optimizer_load_state_dict_pre_hooks
        self._optimizer_load_state_dict_post_hooks = optimizer._optimizer_load_state_dict_post_hooks
        super().__setstate__({})  # what a constructor does, but for groups of its own

    @property
    def optim(self) -> Optimizer:
        """The inner optimizer."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's."""
        return self._inner.defaults

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be copied or pickled: it has a process group. Copy its state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self._inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The inner optimizer's step, and what is due after it. Collective in some steps. Raises TransportError."""
        loss = self._inner.step() if closure is None else self._inner.step(closure)
        self.after_step()
        return loss

    @abc.abstractmethod
    def after_step(self) -> None:
        """Counts a step of the inner optimizer, and does what is due. `step` calls it.

        To be called by those who step the inner optimizer (`optim`) themselves. So with a GradScaler, which leaves out
        steps on one rank alone: ``scaler.step(optimizer.optim)``, then ``optimizer.after_step()``.
        """


def _check(optimizer: Any, who: str) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{who} needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer, "process_group"):
        raise ValueError(
            f"{who} can't wrap {type(optimizer).__name__}, whose steps are collective: ranks step by themselves here"
        )
