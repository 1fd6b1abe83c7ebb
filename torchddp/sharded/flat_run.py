"""Parameters that lie side by side, as one flat parameter: what an optimizer sees of them, and what users see."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import torch

from torchddp import _C

# State that torch's optimizers keep once for a whole parameter; all else they keep for each element.
SCALARS = frozenset({"step", "mu_product"})

State = MutableMapping[torch.Tensor, Any]


class FlatRun:
    """Parameters of equal dtype and device, each dense, in ascending order in ``memory``, with equal state.

    The optimizer steps `flat`, which reaches from the first parameter's first element to the last one's last, gaps and
    all: an element of a gap never meets another. Users see each parameter's state as ever: tensors of its shape, which
    are views of the flat state, and scalars of its own, which are kept equal to the flat one's.
    """

    def __init__(self, params: Sequence[torch.Tensor], memory: torch.Tensor, state: State) -> None:
        self.params = list(params)
        self.memory = memory
        self._dtype = memory.dtype
        self._addresses = [param.data_ptr() for param in params]
        self._offsets = [(address - self._addresses[0]) // memory.itemsize for address in self._addresses]
        begin = (self._addresses[0] - memory.data_ptr()) // memory.itemsize
        self.flat = memory[begin : begin + self._offsets[-1] + self.params[-1].numel()]
        self._grad = torch.zeros_like(self.flat)
        self._grads = self._views(self._grad)
        self._state: dict[str, torch.Tensor] = {}
        self._scalars: dict[str, tuple[torch.Tensor, int]] = {}  # all parameters' in one tensor, and its version
        self._seen: list[Any] = []  # the tensors that users see, in the order of parameters
        self._take_over(state)

    def is_current(self, state: Mapping[torch.Tensor, Any]) -> bool:
        """Whether all parameters or none have gradients, and memory and state are where the run has left them."""
        grads = [param.grad for param in self.params]
        missing = sum(grad is None for grad in grads)
        return (
            missing in (0, len(grads))
            and all(grad is None or grad.dtype == self._dtype for grad in grads)
            and [param.data_ptr() for param in self.params] == self._addresses
            and self._is_as_left(state)
        )

    def hand_over(self, state: State) -> None:
        """Before the optimizer's step: the flat gradient and the flat state."""
        torch._foreach_copy_(self._grads, [param.grad for param in self.params if param.grad is not None])
        self.flat.grad = self._grad
        if self._state:
            state[self.flat] = dict(self._state)

    def take_back(self, state: State) -> None:
        """After the optimizer's step, also one that failed: users' state becomes what was made of the flat one."""
        self.flat.grad = None
        torch.autograd.graph.increment_version(self.params)
        stepped = state.pop(self.flat, self._state)
        if stepped.keys() != self._state.keys() or not all(map(is_, stepped.values(), self._state.values())):
            self._show(stepped, state)
            return
        for key, (values, _) in self._scalars.items():
            values.copy_(stepped[key])
            self._scalars[key] = (values, values._version)

    def _is_as_left(self, state: Mapping[torch.Tensor, Any]) -> bool:
        present = [value for param in self.params for value in state.get(param, {}).values()]
        return (
            len(present) == len(self._seen)
            and all(map(is_, present, self._seen))
            and all(values._version == version for values, version in self._scalars.values())
        )

    def _take_over(self, state: State) -> None:
        """The flat state, of what the parameters have: equal scalars, and other tensors of the parameters' shapes."""
        entries = [dict(state.get(param, {})) for param in self.params]
        flat: dict[str, torch.Tensor] = {}
        for key, value in entries[0].items():
            if key in SCALARS:
                flat[key] = value.clone()
            else:
                flat[key] = torch.zeros_like(self._grad, dtype=value.dtype)
        if not flat:
            return
        self._show(flat, state)
        for key in flat.keys() - SCALARS:
            torch._foreach_copy_([state[param][key] for param in self.params], [entry[key] for entry in entries])

    def _show(self, flat: dict[str, torch.Tensor], state: State) -> None:
        """Gives each parameter its part of the flat state, and remembers it."""
        parts: dict[str, Sequence[torch.Tensor]] = {}
        self._state, self._scalars = flat, {}
        for key, value in flat.items():
            if key in SCALARS:
                values = value.expand(len(self.params)).clone()
                self._scalars[key] = (values, values._version)
                parts[key] = values.unbind()
            else:
                parts[key] = self._views(value)
        self._seen = []
        for index, param in enumerate(self.params):
            entry = {key: part[index] for key, part in parts.items()}
            self._seen.extend(entry.values())
            if entry or param in state:
                state[param] = entry

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            _C.make_flat_view(flat, offset, param.detach().to(flat.dtype))
            for param, offset in zip(self.params, self._offsets, strict=True)
        ]
