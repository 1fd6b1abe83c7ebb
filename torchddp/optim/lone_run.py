"""One parameter that is stepped elsewhere than where it lies."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from torchddp.optim.own_memory import OwnMemory


class LoneRun:
    """As a `FlatRun`, of one dense parameter of any size in shared memory. Its gradient and state are not copied."""

    def __init__(self, param: torch.Tensor, memory: OwnMemory) -> None:
        self.params = [param]
        self.memory = memory
        self.flat = memory.counterpart(param)
        self._address = param.data_ptr()

    def is_current(self, state: Mapping[torch.Tensor, Any]) -> bool:
        """Whether memory is where the run has left it."""
        return self.params[0].data_ptr() == self._address and fits(self.params[0])

    def hand_over(self, state: MutableMapping[torch.Tensor, Any]) -> None:
        """Before the optimizer's step: the parameter's gradient and state."""
        (param,) = self.params
        self.flat.grad = param.grad
        if param in state:
            state[self.flat] = state[param]

    def take_back(self, state: MutableMapping[torch.Tensor, Any]) -> None:
        """After the optimizer's step, also one that failed."""
        self.flat.grad = None
        torch.autograd.graph.increment_version(self.params)
        if self.flat in state:
            state[self.params[0]] = state.pop(self.flat)


def fits(param: torch.Tensor) -> bool:
    """Whether the parameter can be stepped so."""
    dense = param.is_contiguous() or param.is_contiguous(memory_format=torch.channels_last)
    plain = type(param) in (torch.Tensor, torch.nn.Parameter)
    return plain and dense and (param.grad is None or param.grad.dtype == param.dtype)
