"""Communication hooks: checks their signatures and results, and moves them to another process group."""

from __future__ import annotations

import functools
import inspect
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _torch
from torchddp.errors import TransportError
from torchddp.transport.waits import wait_for_future

Hook = Callable[[Any, Any], Any]
HookChoice = Literal["fp16", "bf16", "int8", "int4", "powersgd"] | Hook | tuple[object, Hook]  # of a constructor
# How a constructor's ``comm_hook`` becomes a state and a hook; `_assembly` sets it, as a higher room knows the names.
resolve: Callable[[object], tuple[object, Hook]]


@runtime_checkable
class AttachedHook(Protocol):
    """A hook with its own process groups, like those of ``torchddp.comm_hooks``. Both methods are collective.

    One with a method ``check(model)``, which is not, raises there what it has against the model's parameters, before
    it is attached and before each refresh.
    """

    def attach(self, model: TorchDDP) -> None:
        """Create the groups for the model; called when the hook is registered."""

    def rebind(self, model: TorchDDP) -> None:
        """Recreate the groups for the model's current process group."""


def check_hook_signature(hook: object) -> None:
    """Raise TypeError or ValueError unless ``hook(state, bucket)`` is a valid call and any annotations match."""
    if not callable(hook):
        by_name = " (a name goes into the argument comm_hook=)" if isinstance(hook, str) else ""
        raise TypeError(f"Communication hook must be callable. Got {type(hook).__name__}{by_name}.")
    try:
        # Annotations are strings if the hook's file uses `from __future__ import annotations`.
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        signature = inspect.signature(hook)
    try:
        bound = signature.bind("state", "bucket")
    except TypeError as error:
        raise TypeError(f"Communication hook must be callable as hook(state, bucket): {error}.") from None
    bucket = signature.parameters.get("bucket") or signature.parameters[list(bound.arguments)[-1]]
    if bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket) and not isinstance(bucket.annotation, str):
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket. Got {bucket.annotation!r}.")
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]) and not isinstance(returned, str):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. Got {returned!r}."
        )


def attached(hook: object) -> AttachedHook | None:
    return hook if isinstance(hook, AttachedHook) else None


def check_attached(hook: object, model: TorchDDP) -> None:
    """Raise what the hook has against this rank's parameters. Not collective."""
    if callable(check := getattr(attached(hook), "check", None)):
        check(model)


def follow_parameters(hook: object, state: object, model: TorchDDP) -> None:
    """Tell the hook that the model's parameters have changed. Collective if its ``follow_parameters`` is."""
    if callable(follow := getattr(hook, "follow_parameters", None)):
        follow(model)
    elif _is_torchs_power_sgd(state):
        # It keeps state per bucket. As after registration, it doesn't compress until the buckets have settled.
        powersgd: Any = state
        for held in (powersgd.error_dict, powersgd.p_memory_dict, powersgd.q_memory_dict):
            held.clear()
        powersgd.iter = 0


def _is_torchs_power_sgd(state: object) -> bool:
    return type(state).__name__ == "PowerSGDState" and type(state).__module__.startswith("torch.distributed.")


def describe_all(ddp: TorchDDP, *coming: tuple[object, object]) -> str:
    """The model's hooks, and those that are about to be registered, in words: what must be equal on all ranks."""
    constructors = [(hook, state) for state, hook in ddp.__dict__.get("_coming_hooks", ())]
    found = [describe(hook, state) for hook, state in (*ddp.__dict__.get("_comm_hooks", ()), *constructors, *coming)]
    if (builtin := ddp.__dict__.get("_builtin_hook")) is not None:
        found.append(str(builtin))
    if (buffer_hook := ddp.__dict__.get("buffer_hook")) is not None:
        where = buffer_hook.buffer_comm_hook_location.name
        found.append(f"{describe(buffer_hook.buffer_comm_hook)} for buffers ({where})")
    return ", ".join(found) or "no hook"


def describe(hook: object, state: object = None) -> str:
    """A hook's name and, if it is one of torch's or torchddp's, its options and those of its state."""
    if isinstance(hook, functools.partial):
        return describe(hook.func, state)
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()] if _is_known(hook) else []
    inner = [describe(v) if callable(v) else str(v) for v in cells if callable(v) or _is_plain(v)]
    return name + "".join(f"({', '.join(found)})" for found in (inner, _options_of(hook), _options_of(state)) if found)


def _options_of(value: object) -> list[str]:
    """Its public plain attributes; none for classes of the program, which may hold what belongs to one rank."""
    if not _is_known(value):
        return []
    names = dict.fromkeys([*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ())])
    options = {name: _in_words(getattr(value, name)) for name in names if not name.startswith("_")}
    return [f"{name}={option}" for name, option in options.items() if option]


def _in_words(value: object) -> str:
    """An option that is plain, another hook, a list of both (rules), or a numpy generator; else empty."""
    if _is_plain(value):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_in_words(member) or type(member).__name__ for member in value)}]"
    if type(value).__name__ == "RandomState":
        state: Any = value
        return f"seeded {zlib.crc32(repr(state.get_state()).encode()):08x}"
    return describe(value) if callable(value) else ""


def _is_known(value: object) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.startswith(("torch.distributed.algorithms.", "torchddp."))


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | torch.dtype)


def checked(hook: Hook, rank: int, limit_s: float) -> Hook:
    """Wrap ``hook`` with a check of its return value: the engine can only wait for a torch future.

    ``limit_s``: the model's limit for a reduction; 0: the process group's own.
    """
    name = getattr(hook, "__qualname__", hook)

    @functools.wraps(hook)
    def call(state: object, bucket: dist.GradBucket) -> _torch.CFuture[Any]:
        try:
            future = hook(state, bucket)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"In the communication hook {name!r}, for bucket {bucket.index()} on rank {rank}.")
            raise
        if not isinstance(future, _torch.CFuture):  # base class of torch.futures.Future, returned by Work.get_future()
            raise RuntimeError(  # as torch raises
                f"Communication hook {name!r} returned {type(future).__name__} for "
                f"bucket {bucket.index()} on rank {rank}: it must return a torch.futures.Future that holds one tensor."
            )
        if _is_torchs_power_sgd(state) and bucket.buffer().is_cpu:
            # Its callbacks send more messages, on gloo's threads; with several buckets in flight, ranks would send them
            # in different orders.
            if not wait_for_future(cast("torch.futures.Future[Any]", future), limit_s or math.inf):
                raise TransportError(f"rank {rank}: PowerSGD of bucket {bucket.index()} took more than {limit_s:g} s")
        return future

    return call


def hooks_that_follow(ddp: TorchDDP, new: dist.ProcessGroup) -> list[AttachedHook]:
    """The model's hooks to bind to the new group. RuntimeError if one would keep sending to the old ranks."""
    old, rank = ddp.process_group, ddp.process_group.rank()
    if ddp.__dict__.get("_builtin_hook") is not None and new is not old:
        raise RuntimeError(
            f"the built-in communication hook on rank {rank} can only use the process group it was registered with: "
            "use one of torchddp.comm_hooks, such as FP16, which move to the new group"
        )
    for hook, state in ddp._comm_hooks:
        if not isinstance(hook, AttachedHook) and (reason := _reason_not_to_follow(hook, state, old, new)):
            raise RuntimeError(
                f"the communication hook {getattr(hook, '__qualname__', hook)!r} on rank {rank} can't move to "
                f"another process group: {reason}"
            )
    return [found for hook, _ in ddp._comm_hooks if (found := attached(hook)) is not None]


def _reason_not_to_follow(hook: object, state: object, old: dist.ProcessGroup, new: dist.ProcessGroup) -> str:
    """Why this torch-style hook would send to the wrong ranks; empty if no reason is known."""
    if state is old and new is not old:
        return (
            "its state is the old group itself. Register the hook with a state object that has the group as an "
            "attribute, and set that attribute first"
        )
    if new is not old and getattr(state, "process_group", None) is old:
        return "state.process_group is still the old group. Set state.process_group to the new one first"
    is_torchs = getattr(hook, "__module__", "").startswith("torch.distributed.algorithms.ddp_comm_hooks")
    if state is None and is_torchs and new is not dist.group.WORLD:
        return (
            "without a state, torch's hooks send to all ranks of the default group. Use one of torchddp.comm_hooks, "
            "which move to the new group"
        )
    return ""
