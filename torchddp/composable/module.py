"""What a replicated module can do besides what its class can."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

if TYPE_CHECKING:
    from torchddp.composable.state import ReplicateState

NAME = "replicate"  # in the registry of torch's contract, where fully_shard looks for it
_classes: dict[type, type] = {}


class ReplicateModule:
    """Mixed into the class of a module by `torchddp.replicate`; ``isinstance(module, ReplicateModule)`` tells."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # For a slice of a replicated Sequential: what a class makes of itself is not replicated.
        original: Any = original_class(cls)
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether gradients are reduced in the backwards to come; not collective, but the same on every rank.

        Set it before forward. As with ``fully_shard``, True set between forward and backward counts for that backward;
        not with ``find_unused_parameters`` and ``static_graph``, which must know in forward.

        Args:
            requires_gradient_sync: False: gradients accumulate on each rank. The next backward with True reduces their
                sum.
            recurse: also for replicated modules inside this one.
        """
        for state in _states(self, recurse):
            engine = state.engine
            late = requires_gradient_sync and not engine.require_backward_grad_sync and state.unreduced_forward
            engine.require_backward_grad_sync = requires_gradient_sync
            if late and not (engine.find_unused_parameters or engine.static_graph):
                state.unreduced_forward = False
                engine.reduce_next_backward()

    @contextmanager
    def no_sync(self, *, recurse: bool = True) -> Iterator[None]:
        """Gradients accumulate on each rank inside; the first forward and backward after it reduce the sum.

        Include the forward. Not collective, but every rank must skip the same steps.
        """
        engines = [state.engine for state in _states(self, recurse)]
        before = [engine.require_backward_grad_sync for engine in engines]
        for engine in engines:
            engine.require_backward_grad_sync = False
        try:
            yield
        finally:
            for engine, value in zip(engines, before, strict=True):
                engine.require_backward_grad_sync = value

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As :meth:`torchddp.DistributedDataParallel.register_comm_hook`."""
        state_of(self).engine.register_comm_hook(state, hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A module of the original class, which is not replicated: it has no peers."""
        with plain(cast(torch.nn.Module, self)) as module:
            copied = copy.deepcopy(module, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a module of the original class, which is not replicated."""
        with plain(cast(torch.nn.Module, self)) as module:
            reduced = module.__reduce_ex__(protocol)
            if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
                return reduced  # by a __reduce__ of the user's own
            make, made_of = reduced[:2]
            if make is copyreg.__newobj__:  # type: ignore[attr-defined]
                # Which pickle refuses for another class than the object's; this does the same, by another name.
                make, made_of = copyreg._reconstructor, (type(module), object, None)  # type: ignore[attr-defined]
            return (make, made_of, dict(reduced[2]), *reduced[3:])


def make_replicated(module: torch.nn.Module) -> None:
    """Its class becomes one that is made of it and `ReplicateModule`."""
    original = type(module)
    if original not in _classes:
        _classes[original] = type(f"Replicate{original.__name__}", (ReplicateModule, original), {})
    module.__class__ = _classes[original]


def original_class(replicated: type) -> type:
    """The class that a module had before."""
    return replicated.__mro__[replicated.__mro__.index(ReplicateModule) + 1]


def find_state(module: torch.nn.Module) -> ReplicateState | None:
    for state in module.__dict__.get(STATE_KEY, {}).values():
        if hasattr(state, "engine"):
            return cast("ReplicateState", state)
    return None


def state_of(module: Any) -> ReplicateState:
    """TypeError for a module that is not replicated."""
    state = find_state(module) if isinstance(module, torch.nn.Module) else None
    if state is None:
        raise TypeError(f"this {type(module).__name__} is not replicated: torchddp.replicate(module) makes it so")
    return state


def _states(module: Any, recurse: bool) -> list[ReplicateState]:
    found = [find_state(m) for m in (module.modules() if recurse else [module])]
    return [state for state in found if state is not None]


def forget(module: torch.nn.Module) -> None:
    """Undoes `make_replicated`, and what torch's contract has noted."""
    module.__class__ = original_class(type(module))
    states, registry = module.__dict__[STATE_KEY], module.__dict__[REGISTRY_KEY]
    for key in [key for key, state in states.items() if hasattr(state, "engine")]:
        del states[key]
    del registry[NAME]
    if not states:
        del module.__dict__[STATE_KEY]
    if not registry:
        del module.__dict__[REGISTRY_KEY]


_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_always_called")


@contextmanager
def plain(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Inside, ``module`` is as it was before `replicate`, to be copied; not to be run."""
    state = state_of(module)
    replicated = type(module)
    saved = dict(module.__dict__)
    swapped: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for owner, handles in state.hooked_modules(module):
            ours = {handle.id for handle in handles}
            swapped.append((owner.__dict__, {name: owner.__dict__[name] for name in _HOOKS}))
            for name in _HOOKS:
                hooks = owner.__dict__[name]
                kept = [(key, hook) for key, hook in hooks.items() if key not in ours]
                owner.__dict__[name] = type(hooks)(kept)
        for key in (STATE_KEY, REGISTRY_KEY):
            module.__dict__[key] = {k: v for k, v in saved[key].items() if k != NAME and v is not state}
            if not module.__dict__[key]:
                del module.__dict__[key]
        module.__class__ = original_class(replicated)
        yield module
    finally:
        module.__class__ = replicated
        for key in (STATE_KEY, REGISTRY_KEY):
            module.__dict__[key] = saved[key]
        for attributes, hooks in reversed(swapped):  # a module may be there twice
            attributes.update(hooks)
