"""What the parts of a DistributedDataParallel know of it, and how wrappers of the same parameters know each other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C
from torchddp.ddp import hooks
from torchddp.ddp.logger import DDPLogger
from torchddp.ddp.observers import Observers
from torchddp.ddp.session import ReducerSession, SessionOwner
from torchddp.errors import warn_user


class Wrapper(SessionOwner):
    """The base of `torchddp.DistributedDataParallel`: what its parts use of it."""

    reducer: _C.Reducer  # type: ignore[assignment]  # torch's stubs expect torch's own
    logger: DDPLogger
    session: ReducerSession
    observers: Observers
    _builtin_hook: dist.BuiltinCommHookType | None = None
    _siblings: list[weakref.ref[Wrapper]]

    refresh_trainable: Callable[[], None]

    def _install_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        limit_s = self.session.wait_limit.total_seconds()
        self.reducer.register_comm_hook(state, hooks.checked(hook, self.process_group.rank(), limit_s))
        self.logger._set_comm_hook_name(getattr(hook, "__qualname__", type(hook).__qualname__))

    def _names_to_ignore(self) -> set[str]:
        """Names of the parameters and buffers that the module currently asks DDP to ignore."""
        return set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))


def wrapped_inside(module: torch.nn.Module) -> list[TorchDDP]:
    """The DDP modules inside ``module`` whose parameters would be reduced twice.

    ValueError if two reducers would overwrite each other's gradients, or an inner wrapper keeps them outside ``.grad``.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    ids = {id(p) for n, p in module.named_parameters() if n not in ignored and p.requires_grad}
    inner = [m for m in module.modules() if isinstance(m, TorchDDP) and any(id(p) in ids for p in m._module_parameters)]
    for other in inner:
        # Our wrappers switch to copying (`copy_gradients`); torch's can't switch after construction.
        if other.gradient_as_bucket_view and not _has_our_reducer(other):
            raise ValueError(
                "DistributedDataParallel can't wrap a model in which torch.nn.parallel.DistributedDataParallel with "
                "gradient_as_bucket_view=True wraps the same parameters: both would average the same gradients, in "
                "the buckets of one of them. Wrap once: give this class the model itself (its .module)."
            )
        if _takes_gradients(other):
            raise ValueError(
                "DistributedDataParallel can't wrap a model that is already wrapped with "
                "Precision(main_grads=torch.float32): that wrapper moves gradients to main_grad. Wrap once: give this "
                "class the model itself (its .module)."
            )
    if inner:
        warn_user(
            "DistributedDataParallel wraps a model that is already wrapped: its gradients are reduced twice, at twice "
            "the cost. Pass the module itself (model.module); trainers such as Accelerate wrap in prepare()."
        )
    return inner


def copy_gradients(models: Iterable[TorchDDP]) -> None:
    """Make torchddp's models among these copy averages back, because ``.grad`` can't be a view of two buckets."""
    for ddp in models:
        if _has_our_reducer(ddp):
            ddp._shares_gradients = True  # survives pickling
            ddp.reducer.share_gradients()
            ddp.gradient_as_bucket_view = False


_alive: weakref.WeakSet[Wrapper] = weakref.WeakSet()  # torchddp's wrappers in this process


def link_wrappers(ddp: Wrapper) -> None:
    mine = {id(parameter) for parameter in ddp._module_parameters}
    for other in list(_alive):
        if any(id(parameter) in mine for parameter in other._module_parameters):
            ddp._siblings.append(weakref.ref(other))
            other._siblings.append(weakref.ref(ddp))
    _alive.add(ddp)


def share_with_siblings(ddp: Wrapper) -> None:
    """Before a forward: one backward may serve all wrappers of these parameters that await theirs."""
    ddp._siblings[:] = [sibling for sibling in ddp._siblings if sibling() is not None]
    if _is_one_with_main_grads(ddp):
        gc.collect()  # wrappers that the program has dropped don't count
        if _is_one_with_main_grads(ddp):
            raise RuntimeError(
                f"rank {ddp.session.rank}: two wrappers reduce the same parameters, and only one has "
                "main_grads=. It moves gradients to main_grad, so the other finds none in .grad: wrap once"
            )
    if waiting := [other for other in _siblings_of(ddp) if other.session.awaits_backward]:
        copy_gradients([*waiting, ddp])


def _siblings_of(ddp: Wrapper) -> list[Wrapper]:
    alive = [other for sibling in ddp._siblings if (other := sibling()) is not None]
    return [other for other in alive if "session" in other.__dict__ and other.session.is_open]


def _is_one_with_main_grads(ddp: Wrapper) -> bool:
    return any(_takes_gradients(other) != _takes_gradients(ddp) for other in _siblings_of(ddp))


def _has_our_reducer(ddp: TorchDDP) -> TypeGuard[Wrapper]:
    return isinstance(getattr(ddp, "reducer", None), _C.Reducer)


def _takes_gradients(ddp: TorchDDP) -> bool:
    """Whether the wrapper stores gradients outside ``.grad``, where no other wrapper finds them."""
    return _has_our_reducer(ddp) and not ddp.session.precision.can_share


def check_outer(ddp: Wrapper, outer: TorchDDP | None) -> None:
    """Before the first forward of ``ddp``, check the wrapper ``outer`` whose forward is running, if any.

    RuntimeError if torch's class wraps the same parameters, and their gradients are views of ``ddp``'s buckets.
    """
    if outer is None or _has_our_reducer(outer):
        return  # ours checked this when it was constructed
    if {id(p) for p in ddp._module_parameters}.isdisjoint(map(id, outer._module_parameters)):
        return
    what = (
        "torch.nn.parallel.DistributedDataParallel wraps a model that is already wrapped by torchddp, so its gradients "
        "are averaged twice"
    )
    once = "Wrap once (trainers such as Accelerate wrap in prepare(): give it the model itself)."
    if ddp.gradient_as_bucket_view:
        raise RuntimeError(f"{what}, in the same memory, with wrong results. {once}")
    warn_user(f"{what}, at twice the cost. {once}")
    copy_gradients([ddp])
