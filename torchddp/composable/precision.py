"""torch's MixedPrecisionPolicy: forward and backward use narrower copies of the optimizer's parameters.

During forward, the modules hold low-precision copies instead of their parameters. The copies are part of the graph, so
gradients flow back through the cast to the parameters, in the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchddp import _torch

T = TypeVar("T")


def cast_tensors(value: T, dtype: torch.dtype | None) -> T:
    """``value`` with its floating-point tensors cast to ``dtype``; None: unchanged."""
    if dtype is None:
        return value
    cast: T = _torch.apply_to_tensors(lambda t: t.to(dtype) if torch.is_floating_point(t) else t, value)
    return cast


class ParameterCast:
    """Low-precision copies in place of parameters. Their modules get hooks too, for activation checkpointing."""

    def __init__(self, module: torch.nn.Module, parameters: Collection[torch.Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.active = False
        self.owners: list[_Owner] = []
        wanted = {id(p) for p in parameters if p.is_floating_point() and p.dtype != dtype}
        for owner in module.modules():
            names = [name for name, p in owner._parameters.items() if p is not None and id(p) in wanted]
            if names:
                self.owners.append(_Owner(self, owner, names))

    def enter(self) -> None:
        """Make the modules compute with copies: one per parameter, even if several modules share it."""
        self.active = True
        copies: dict[int, torch.Tensor] = {}
        for owner in self.owners:
            owner.put(copies, self.dtype)

    def leave(self) -> None:
        for owner in self.owners:
            owner.restore()
        self.active = False

    def remove(self) -> None:
        for owner in self.owners:
            for handle in owner.handles:
                handle.remove()


class _Owner:
    """A module with parameters of its own, and hooks for its forward when recomputed outside the model's."""

    def __init__(self, cast: ParameterCast, module: torch.nn.Module, names: Collection[str]) -> None:
        self.module = module
        self._cast = cast
        self._names = names
        self._replaced: dict[str, tuple[torch.nn.Parameter, torch.Tensor]] = {}  # by copies that are in place
        self._depth = 0  # from recomputed forwards
        self.handles: list[Any] = [
            module.register_forward_pre_hook(self.begin, prepend=True),
            module.register_forward_hook(self.end, always_call=True),
        ]

    def put(self, copies: dict[int, torch.Tensor], dtype: torch.dtype) -> None:
        registered: dict[str, Any] = self.module._parameters
        for name in self._names:
            parameter = registered.get(name)  # also one that the program has put there since
            # Otherwise it was removed, or its copy is already in place.
            if isinstance(parameter, torch.nn.Parameter) and parameter.is_floating_point():
                if id(parameter) not in copies:
                    copies[id(parameter)] = parameter.to(dtype)
                registered[name] = copies[id(parameter)]
                self._replaced[name] = parameter, copies[id(parameter)]
        self._update_rnn()

    def restore(self) -> None:
        registered: dict[str, Any] = self.module._parameters
        for name, (parameter, copy) in self._replaced.items():
            if registered.get(name) is copy:  # otherwise forward has put something else there
                registered[name] = parameter
        self._replaced.clear()
        self._update_rnn()

    def _update_rnn(self) -> None:
        names = getattr(self.module, "_flat_weights_names", None)  # torch.nn.RNNBase keeps a list of weights
        if names is not None:
            self.module.__dict__["_flat_weights"] = [getattr(self.module, name, None) for name in names]

    def begin(self, _module: torch.nn.Module, _args: object) -> None:
        if not self._cast.active and _torch.graph_task() is not None:
            self._depth += 1
            self.put({}, self._cast.dtype)

    def end(self, _module: torch.nn.Module, _args: object, _output: object) -> None:
        if self._depth > 0:
            self._depth -= 1
            if self._depth == 0:
                self.restore()

    def __reduce__(self) -> tuple[Callable[[], _NoHook], tuple[()]]:
        return _NoHook, ()  # in a pickled copy of the module, which is not replicated


class _NoHook:
    """What remains of an `_Owner`'s hooks in a copy; deepcopy() keeps the owner's functions, which then do nothing."""

    active, _depth = True, 0

    @property
    def _cast(self) -> _NoHook:
        return self

    def begin(self, *_: object) -> None:
        pass

    end = begin


def reduce_in(dtype: torch.dtype) -> Callable[[dist.ProcessGroup, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """A communication hook: cast, divide, sum over the ranks in that dtype, cast back."""

    def reduce_cast(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        sent = flat.to(dtype, copy=True).div_(group.size())
        sums: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(sent, group=group, async_op=True).get_future()

        def back(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return flat.copy_(future.value()[0])

        return sums.then(back)

    reduce_cast.__qualname__ = f"reduce_in_{str(dtype).removeprefix('torch.')}"
    return reduce_cast
