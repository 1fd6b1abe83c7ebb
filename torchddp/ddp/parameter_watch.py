"""Whether a model still has the parameters whose gradients its reducer hears of."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from torchddp.errors import warn_user

__all__ = ["ParameterWatch"]

_SHOWN_NAMES = 4
_STATELESS = torch.nn.utils.stateless.__file__


class ParameterWatch:
    """Says once, in a warning, which parameters the reducer has lost.

    Two things take them from it without an error: another parameter in the place of one (``load_state_dict`` with
    ``assign=True``), and a conversion to another dtype or device, for which autograd gives the same parameter a new
    node; the reducer's hook is on the old one. Then no gradient arrives, and each rank trains for itself.

    To look costs some microseconds a hundred parameters. So that is done in the first step, and when a step has ended
    in which no gradient came, at the first, second, fourth, eighth ... such step: nothing in steps that are as they
    should be.
    """

    def __init__(self, module: torch.nn.Module, parameters: Sequence[torch.Tensor], names: Iterable[str]) -> None:
        there = _ids(module)
        self._hooked = [
            (name, parameter, parameter.dtype, _node(parameter), id(parameter) in there)
            for name, parameter in zip(names, parameters, strict=True)
        ]
        self.in_doubt = True
        self._steps_without_gradients = 0

    def step_without_gradients(self) -> None:
        """The last synchronised forward was followed by no gradient; often there was no backward for it."""
        self._steps_without_gradients += 1
        self.in_doubt = self._steps_without_gradients & (self._steps_without_gradients - 1) == 0

    @torch._disable_dynamo(recursive=True)
    def look(self, module: torch.nn.Module, rank: int) -> None:
        """Ends the doubt. Before forward, not collective."""
        self.in_doubt = False
        there = _ids(module)
        replaced = [
            name for name, parameter, _, _, was_there in self._hooked if was_there and id(parameter) not in there
        ]
        converted = [
            f"{name} ({dtype} to {parameter.dtype})" if parameter.dtype != dtype else name
            for name, parameter, dtype, node, _ in self._hooked
            if parameter.requires_grad and _node(parameter) is not node
        ]
        if not (replaced or converted) or (replaced and _in_functional_call()):
            return
        self._hooked = []
        found = [
            f"{_listed(names)} {what}" for names, what in ((converted, _CONVERTED), (replaced, _REPLACED)) if names
        ]
        warn_user(
            f"The model of this DistributedDataParallel (rank {rank}) was changed after it was wrapped: "
            f"{'; '.join(found)}. Their gradients are not averaged any more: each rank trains them for itself. Convert "
            "the model and load into it before wrapping, or wrap it again (the module itself, .module); a state dict "
            "loaded without assign=True keeps the parameters."
        )


_CONVERTED = "converted to another dtype or device"
_REPLACED = "replaced by other parameters (load_state_dict with assign=True, or an assignment)"


def _ids(module: torch.nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _node(parameter: torch.Tensor) -> Any:
    """Where autograd accumulates the gradient; the same object as long as somebody has it."""
    return torch.autograd.graph.get_gradient_edge(parameter).node if parameter.requires_grad else None


def _in_functional_call() -> bool:
    """Whether other tensors stand in for the parameters for the time of this call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _STATELESS:
            return True
        frame = frame.f_back
    return False


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    text = ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
    return f"{text} {'was' if len(names) == 1 else 'were'}"
