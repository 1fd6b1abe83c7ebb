"""Post-local SGD: averages of parameters instead of gradients, after a warm-up."""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.optim import Optimizer

from torchddp.averaging.wrapper import OptimizerWrapper
from torchddp.traffic import Traffic

__all__ = ["PostLocalSGD"]


class PostLocalSGD(OptimizerWrapper):
    """Any optimizer, with parameters averaged after its steps (post-local SGD, Lin et al. 2020).

        averager = PeriodicAverager(model, period=8, warmup_steps=100)
        optimizer = PostLocalSGD(torch.optim.AdamW(model.parameters(), lr=1e-3), averager)

    The optimizer's own state (momentum) stays local. Takes the place of torch's PostLocalSGDOptimizer, with the same
    ``state_dict``: the inner optimizer's and ``"step"``.

    Args:
        optimizer: any of torch's, but for those whose steps are collective.
        averager: `PeriodicAverager`, `HierarchicalAverager` or one of torch's.

    Not collective; `step` is where the averager says so. Raises TypeError and ValueError for what it can't wrap.
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
        """Bytes of the last average; None with an averager of torch's."""
        return getattr(self.averager, "traffic", None)

    def after_step(self) -> None:
        """See `OptimizerWrapper.after_step`."""
        self.averager.average_parameters(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the next average is set up anew, by all ranks."""
        self._inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the averager's ``"step"``."""
        return {**self._inner.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also of torch's PostLocalSGDOptimizer; warns and counts from 0 where there is no ``"step"``."""
        self._inner.load_state_dict(state_dict)
        if "step" not in state_dict:
            warnings.warn("the state dict has no 'step' of an averager: counting from 0", stacklevel=2)
        self.averager.step = state_dict.get("step", 0)
