"""Parameters that are still being received: whoever reads them through their module waits for them.

Between a step and the first use of a module, `PendingParameters` stands in for the module's dictionary of parameters:
any access waits for those parameters and puts the plain dictionary back. So forward, `state_dict`, `parameters`, and
`module.weight` all see the values after the step. A tensor that somebody holds a reference to does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Parameters = dict[str, nn.Parameter | None]  # a module's own, as torch types them


class PendingParameters(Parameters):
    """A module's dictionary of parameters, until they have arrived. Methods of dict are added below."""

    def __init__(self, module: nn.Module, wait: Callable[[], None]) -> None:
        self._module = module
        self._plain = module._parameters
        self._wait = wait
        super().__init__(self._plain)  # code that bypasses our methods sees the same parameters
        module.__dict__["_parameters"] = self

    def resolve(self) -> Parameters:
        """Waits, puts the plain dictionary back, and returns it."""
        if self._module.__dict__.get("_parameters") is self:
            self._module.__dict__["_parameters"] = self._plain
        self._wait()
        return self._plain

    def __contains__(self, name: object) -> bool:
        return name in self._plain and name in self.resolve()

    def __reduce__(self) -> tuple[type, tuple[Parameters]]:
        return (dict, (self.resolve(),))


def _add_method(name: str) -> None:
    def call(self: PendingParameters, *arguments: Any, **more: Any) -> Any:
        return getattr(self.resolve(), name)(*arguments, **more)

    setattr(PendingParameters, name, call)


for _name in ("get", "items", "values", "keys", "copy", "pop", "update", "setdefault", "clear"):
    _add_method(_name)
for _name in ("getitem", "setitem", "delitem", "iter"):
    _add_method(f"__{_name}__")


class PendingModules:
    """The modules whose own parameters lie in chunks of flat memory, and the chunks that each waits for.

    ``chunks``: the parameters of each chunk.
    """

    def __init__(self, root: nn.Module, chunks: Sequence[Sequence[torch.Tensor]]) -> None:
        chunk_of = {param: index for index, params in enumerate(chunks) for param in params}
        self._needs: list[tuple[nn.Module, list[int]]] = []
        for module in root.modules():
            own = [param for param in module._parameters.values() if param is not None]
            wanted = sorted({chunk_of[param] for param in own if param in chunk_of})
            if wanted:
                self._needs.append((module, wanted))
        self._hooks: list[RemovableHandle] = []

    def wait_on_access(self, wait: Callable[[Sequence[int]], None]) -> None:
        """From now on the first access to a module's parameters calls ``wait`` with the indices of its chunks."""
        for module, wanted in self._needs:
            if not isinstance(module._parameters, PendingParameters):
                PendingParameters(module, partial(wait, wanted))

    def resolve(self) -> None:
        """Waits for all parameters, and gives all modules their plain dictionaries back."""
        for module, _ in self._needs:
            _resolve(module)

    def install_hooks(self) -> None:
        """Adds hooks to modules that keep weights in lists of their own (recurrent ones), which no dictionary sees."""
        for module, _ in self._needs:
            if isinstance(module, nn.RNNBase):
                self._hooks.append(module.register_forward_pre_hook(_resolve))

    def remove_hooks(self) -> None:
        """Removes what `install_hooks` has added."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def is_compiling() -> bool:
    """Whether torch.compile traces the running code: compiled code bypasses dictionaries."""
    get_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return get_callback is not None and get_callback() not in (None, False)


def _resolve(module: nn.Module, *_: object) -> None:
    if isinstance(module._parameters, PendingParameters):
        module._parameters.resolve()
