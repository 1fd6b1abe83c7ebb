"""Parameters that are still on their way are waited for by whoever reads them through their module.

Between a step and the first use of a module, the module's dictionary of parameters is a `PendingParameters`: any access
waits for those parameters and puts the plain dictionary back. So forward, `state_dict`, `parameters`, and
`module.weight` all see what the step has made of them. Tensors that somebody holds on to by themselves don't wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


class PendingParameters(dict[str, Any]):
    """A module's parameters, before they may be read."""

    def __init__(self, module: nn.Module, arrive: Callable[[], None]) -> None:
        self._module = module
        self._plain: dict[str, Any] = module._parameters
        self._arrive = arrive
        super().__init__(self._plain)  # what looks past our methods sees the same parameters
        module.__dict__["_parameters"] = self

    def settle(self) -> dict[str, Any]:
        """Waits, and puts the plain dictionary back, which it returns."""
        if self._module.__dict__.get("_parameters") is self:
            self._module.__dict__["_parameters"] = self._plain
        self._arrive()
        return self._plain

    def __getitem__(self, name: str) -> Any:
        return self.settle()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._plain and name in self.settle()

    def __iter__(self) -> Iterator[str]:
        return iter(self.settle())

    def get(self, name: str, default: Any = None) -> Any:
        return self.settle().get(name, default)

    def items(self) -> Any:
        return self.settle().items()

    def values(self) -> Any:
        return self.settle().values()

    def keys(self) -> Any:
        return self.settle().keys()

    def copy(self) -> dict[str, Any]:
        return self.settle().copy()

    def __setitem__(self, name: str, value: Any) -> None:
        self.settle()[name] = value

    def __delitem__(self, name: str) -> None:
        del self.settle()[name]

    def pop(self, *arguments: Any) -> Any:
        return self.settle().pop(*arguments)

    def update(self, *arguments: Any, **more: Any) -> None:
        self.settle().update(*arguments, **more)

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self.settle().setdefault(name, default)

    def clear(self) -> None:
        self.settle().clear()

    def __reduce__(self) -> Any:
        return (dict, (self.settle(),))


class PendingModules:
    """The modules whose own parameters lie in chunks, and what they wait for."""

    def __init__(self, root: nn.Module, chunks: Sequence[Sequence[torch.Tensor]]) -> None:
        chunk_of = {param: index for index, params in enumerate(chunks) for param in params}
        self._waits_for: list[tuple[nn.Module, list[int]]] = []
        for module in root.modules():
            own = [param for param in module._parameters.values() if param is not None]
            wanted = sorted({chunk_of[param] for param in own if param in chunk_of})
            if wanted:
                self._waits_for.append((module, wanted))
        self._hooks: list[Any] = []

    def hold(self, wait: Callable[[Sequence[int]], None]) -> None:
        """From now on each module's parameters wait for their chunks, once."""
        for module, wanted in self._waits_for:
            if not isinstance(module._parameters, PendingParameters):
                PendingParameters(module, _bind(wait, wanted))

    def settle(self) -> None:
        """All modules have their plain dictionaries back. Waits for what they wait for."""
        for module, _ in self._waits_for:
            if isinstance(module._parameters, PendingParameters):
                module._parameters.settle()

    def install_hooks(self) -> None:
        """For modules that keep their weights in lists of their own (recurrent ones), which no dictionary sees."""
        for module, _ in self._waits_for:
            if isinstance(module, nn.RNNBase):
                self._hooks.append(module.register_forward_pre_hook(_settle_hook))

    def remove_hooks(self) -> None:
        """Modules are as they were before `install_hooks`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def is_compiling() -> bool:
    """Whether torch.compile traces what is run now: compiled code looks past dictionaries."""
    get_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return get_callback is not None and get_callback() not in (None, False)


def _bind(wait: Callable[[Sequence[int]], None], wanted: Sequence[int]) -> Callable[[], None]:
    return lambda: wait(wanted)


def _settle_hook(module: nn.Module, _: Any) -> None:
    if isinstance(module._parameters, PendingParameters):
        module._parameters.settle()
