"""A replicated module: its added methods, its engine, and the hooks around its forward."""

from __future__ import annotations

import copy
import copyreg
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, SupportsIndex, cast

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _torch
from torchddp.composable.engine import ReplicateEngine
from torchddp.composable.precision import ParameterCast, cast_tensors
from torchddp.ddp.forward import Inputs
from torchddp.ddp.weights import LossKind

NAME = "replicate"  # the registry of torch's contract, where fully_shard looks for it
_classes: dict[type, type] = {}
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)


class _Call(threading.local):
    """Of the module on this thread: another one may evaluate it meanwhile."""

    is_open = False  # the module is running its forward
    recurses = False  # its forward has called it again, which is part of the same step
    outer: TorchDDP | None = None


class ReplicateState(_torch.State):
    engine: ReplicateEngine
    policy: MixedPrecisionPolicy
    cast: ParameterCast | None

    def __init__(self) -> None:
        super().__init__()
        self._call = _Call()
        self._had_graph = False
        self.unreduced_forward: object = None  # the last forward, if it was not synchronized and awaits its backward
        self._handles: list[Any] = []

    def install(
        self,
        module: torch.nn.Module,
        engine: ReplicateEngine,
        policy: MixedPrecisionPolicy,
        parameters: Callable[[], Mapping[str, torch.nn.Parameter]],
    ) -> None:
        """``parameters``: returns the module's current replicated parameters."""
        self.engine, self.policy, self.cast = engine, policy, None
        if (dtype := policy.param_dtype) is not None:

            def cast_anew() -> None:
                if self.cast is not None:
                    self.cast.remove()
                self.cast = ParameterCast(module, parameters().values(), dtype)

            engine.refreshed = cast_anew
            cast_anew()
        # Outermost on both sides, except for hooks registered later.
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward),
            module.register_forward_hook(self._after_failure, always_call=True),
            module.register_state_dict_pre_hook(self.end_interrupted),
            module.register_load_state_dict_pre_hook(self.end_interrupted),
        ]

    def hooked_modules(self, module: torch.nn.Module) -> list[tuple[torch.nn.Module, list[Any]]]:
        """The modules with our hooks, and the hooks' handles; ``module`` first."""
        others = [] if self.cast is None else [(owner.module, owner.handles) for owner in self.cast.owners]
        return [(module, self._handles), *others]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.cast is not None:
            self.cast.remove()
        self.engine.release()

    @_torch.disable_dynamo(recursive=True)
    def _before_forward(self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        if self._call.is_open:
            if _calls_of(module) > 1:
                self._call.recurses = True
                return args, kwargs
            self._close()  # the previous forward ended with a KeyboardInterrupt, which hooks don't see
        if "fully_shard" in module.__dict__[_torch.REGISTRY_KEY]:
            raise RuntimeError(
                "this module was given to fully_shard() after torchddp.replicate(), and both would reduce its "
                "gradients: use one of them, or call fully_shard() on inner modules before replicate()"
            )
        if _torch.graph_task() is not None:
            self._check_rerun()
            return self._cast_inputs(args, kwargs)
        self._call.is_open = True
        self._call.outer, TorchDDP._active_ddp_module = TorchDDP._active_ddp_module, self.engine
        args, kwargs = self.engine._pre_forward(*args, **kwargs)
        with_graph = torch.is_grad_enabled()
        self._had_graph = with_graph or self.unreduced_forward is not None  # an evaluation may come in between
        if with_graph:
            self.unreduced_forward = None if self.engine.require_backward_grad_sync else object()
        args, kwargs = self._cast_inputs(args, kwargs)
        if self.cast is not None:
            self.cast.enter()
        return args, kwargs

    @_torch.disable_dynamo(recursive=True)
    def _after_forward(self, module: torch.nn.Module, _args: object, output: object) -> object:
        if self._call.is_open:
            if self._call.recurses and _calls_of(module) > 1:
                return output
            self._close()
            output = self.engine._post_forward(output)
            with_graph = [t for t in _torch.find_tensors(output) if t.requires_grad] if self.unreduced_forward else []
            if with_graph:
                ends = partial(self._backward_begins, self.unreduced_forward)
                torch.autograd.graph.register_multi_grad_hook(with_graph, ends, mode="any")
        return cast_tensors(output, self.policy.output_dtype)

    def _backward_begins(self, forward: object, _grad: torch.Tensor) -> None:
        """Of this forward, which was not synchronized: to synchronize from now on concerns the next one."""
        if self.unreduced_forward is forward and _torch.accumulates(self.engine.parameters()):
            self.unreduced_forward = None

    @_torch.disable_dynamo(recursive=True)
    def _after_failure(self, module: torch.nn.Module, _args: object, _output: object) -> None:
        """Also called after success, when there is nothing left to close."""
        if not self._call.is_open or (self._call.recurses and _calls_of(module) > 1):
            return
        self._close()
        error = sys.exc_info()[1]
        if error is not None:
            self.engine.observers.on_error(error)

    def end_interrupted(self, module: torch.nn.Module, *_: object) -> None:
        """Put the parameters back after a KeyboardInterrupt, which forward's hooks don't see."""
        if self._call.is_open and not _calls_of(module):
            self._close()

    def _cast_inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Inputs:
        if not self.policy.cast_forward_inputs:
            return args, kwargs
        return cast_tensors(args, self.policy.param_dtype), cast_tensors(kwargs, self.policy.param_dtype)

    def _close(self) -> None:
        self._call.is_open = self._call.recurses = False
        TorchDDP._active_ddp_module, self._call.outer = self._call.outer, None
        if self.cast is not None:
            self.cast.leave()

    def _check_rerun(self) -> None:
        """A forward during backward is a recomputation for activation checkpointing, not a step."""
        if torch.is_grad_enabled() and not self._had_graph and not self.engine.session.awaits_backward:
            raise RuntimeError(
                f"a replicated module (rank {self.engine.session.rank}) runs inside checkpoint(use_reentrant=True): "
                "its forward has no graph until backward, so its gradients would not be reduced. Use "
                "use_reentrant=False, or replicate the model as a whole."
            )


def _calls_of(module: torch.nn.Module) -> int:
    """How many calls of ``module``, each inside the one before, are running."""
    calls = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if frame.f_code is _torch.MODULE_CALL)
    return sum(frame.f_locals.get("self") is module for frame in calls)


class ReplicateModule:
    """Mixed into a module's class by `torchddp.replicate`; test with ``isinstance(module, ReplicateModule)``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # For slices of a replicated Sequential, which creates them with its own class: they are not replicated.
        original: Any = original_class(cls)
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the following backwards reduce gradients. Not collective, but must be the same on every rank.

        Set it before forward. As with ``fully_shard``, setting True between forward and backward applies to that
        backward, except with ``find_unused_parameters`` and ``static_graph``, which must know in forward. With False,
        gradients accumulate on each rank until a backward with True. ``recurse``: also for replicated submodules.
        """
        for state in _states(self, recurse):
            engine = state.engine
            late = not engine.require_backward_grad_sync and state.unreduced_forward is not None
            engine.require_backward_grad_sync = requires_gradient_sync
            if requires_gradient_sync and late and not (engine.find_unused_parameters or engine.static_graph):
                state.unreduced_forward = None
                engine.reduce_next_backward()

    @contextmanager
    def no_sync(self, *, recurse: bool = True) -> Iterator[None]:
        """Accumulate gradients on each rank; the first forward and backward afterwards reduce the sum.

        Include the forward in the context. Not collective, but every rank must skip the same steps.
        """
        with ExitStack() as stack:
            for state in _states(self, recurse):
                stack.enter_context(state.engine.no_sync())
            yield

    def weigh(self, weight: float | torch.Tensor, *, loss: LossKind = "mean", recurse: bool = True) -> None:
        """See :meth:`torchddp.DistributedDataParallel.weigh`. ``recurse``: also for replicated submodules."""
        for state in _states(self, recurse):
            state.engine.weigh(weight, loss=loss)

    def refresh_trainable(self) -> None:
        """Update what is reduced after parameters inside were frozen, thawed, added or removed. Collective.

        See :meth:`torchddp.DistributedDataParallel.refresh_trainable`. Without submodules replicated alone.
        """
        state = state_of(self)
        state.end_interrupted(cast(torch.nn.Module, self))
        state.engine.refresh_trainable()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """See :meth:`torchddp.DistributedDataParallel.register_comm_hook`."""
        state_of(self).engine.register_comm_hook(state, hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Copy as a module of the original class, which is not replicated because it has no peers."""
        with plain(cast(torch.nn.Module, self)) as module:
            copied = copy.deepcopy(module, memo)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle as a module of the original class, which is not replicated."""
        with plain(cast(torch.nn.Module, self)) as module:
            reduced = module.__reduce_ex__(protocol)
            if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
                return reduced  # from the user's own __reduce__
            make, made_of = reduced[:2]
            if make is copyreg.__newobj__:  # type: ignore[attr-defined]
                # pickle refuses it for a class other than the object's; this does the same under another name.
                make, made_of = copyreg._reconstructor, (type(module), object, None)  # type: ignore[attr-defined]
            return (make, made_of, dict(reduced[2]), *reduced[3:])


def make_replicated(module: torch.nn.Module) -> ReplicateState:
    """Change its class, and let torch's contract know. Its state still has to be installed."""

    def mark(marked: torch.nn.Module) -> torch.nn.Module:
        original = type(marked)
        if original not in _classes:
            _classes[original] = type(f"Replicate{original.__name__}", (ReplicateModule, original), {})
        marked.__class__ = _classes[original]
        return marked

    mark.__name__ = NAME
    composable = _torch.contract(state_cls=ReplicateState)(mark)
    composable(module)
    return composable.state(module)


def original_class(replicated: type) -> type:
    return replicated.__mro__[replicated.__mro__.index(ReplicateModule) + 1]


def find_state(module: torch.nn.Module) -> ReplicateState | None:
    states = module.__dict__.get(_torch.STATE_KEY, {}).values()
    return next((state for state in states if isinstance(state, ReplicateState)), None)


def state_of(module: object) -> ReplicateState:
    """TypeError for a module that is not replicated."""
    state = find_state(module) if isinstance(module, torch.nn.Module) else None
    if state is None:
        raise TypeError(f"this {type(module).__name__} is not replicated: call torchddp.replicate(module) first")
    return state


def sole_engine(module: torch.nn.Module) -> ReplicateEngine | None:
    """The engine of a replicated module; None for other modules, and if several modules inside are replicated."""
    engines = engines_in(module) if isinstance(module, ReplicateModule) else []
    return engines[0] if len(engines) == 1 else None


def engines_in(module: torch.nn.Module) -> list[ReplicateEngine]:
    return [state.engine for state in _states(module, recurse=True)]


def _states(root: object, recurse: bool) -> list[ReplicateState]:
    module = cast(torch.nn.Module, root)
    return [state for m in (module.modules() if recurse else [module]) if (state := find_state(m)) is not None]


def forget(module: torch.nn.Module) -> None:
    """Undo `make_replicated`, and remove what torch's contract recorded."""
    module.__class__ = original_class(type(module))
    for key in (_torch.STATE_KEY, _torch.REGISTRY_KEY):
        recorded = module.__dict__.pop(key).items()
        if others := {k: v for k, v in recorded if k != NAME and not isinstance(v, ReplicateState)}:
            module.__dict__[key] = others


@contextmanager
def plain(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Inside this context ``module`` is as before `replicate`, for copying; it must not be run."""
    state = state_of(module)
    state.end_interrupted(module)
    replicated = type(module)
    saved = dict(module.__dict__)
    swapped: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for owner, handles in state.hooked_modules(module):
            ours = {handle.id for handle in handles}
            swapped.append((owner.__dict__, {name: owner.__dict__[name] for name in _HOOKS}))
            for name in _HOOKS:
                hooks = owner.__dict__[name]
                owner.__dict__[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in ours)
        forget(module)
        yield module
    finally:
        module.__class__ = replicated
        for key in (_torch.STATE_KEY, _torch.REGISTRY_KEY):
            module.__dict__[key] = saved[key]
        for attributes, hooks in reversed(swapped):  # a module may be listed twice
            attributes.update(hooks)
