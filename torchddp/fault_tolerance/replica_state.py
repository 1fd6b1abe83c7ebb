"""State that a healing replica gets from a healthy one besides the optimizer's."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

from torchddp.comm_hooks import CommHook
from torchddp.ddp.module import DistributedDataParallel
from torchddp.fault_tolerance.manager import Manager

_counts: weakref.WeakKeyDictionary[Manager, itertools.count[int]] = weakref.WeakKeyDictionary()


def bucket_names(model: DistributedDataParallel) -> list[list[str]]:
    """The parameters of each bucket, in reduction order."""
    names = [spec.name for spec in model.session.specs]
    return [[names[index] for index in bucket.params] for bucket in model.reducer.plan.buckets]


def state_dict(model: DistributedDataParallel) -> dict[str, Any]:
    """The wrapped module's state dict ("module"), its buckets ("buckets"), and its hook's carried state ("hooks").

    Not collective. For `Manager.register_state_dict_fn` or checkpoints; the tensors are the live ones.
    """
    return {"module": model.module.state_dict(), "buckets": bucket_names(model), "hooks": _hook_states(model)}


def load_state_dict(model: DistributedDataParallel, state: Mapping[str, Any]) -> None:
    """Load another replica's :func:`state_dict`. Not collective.

    Raises:
        RuntimeError: the other replica has different buckets (names the first that differs), so sums with it would be
            meaningless; or a module with different parameters, as torch reports it.
    """
    _load(model, state, weights=True)


def hooks_of(model: DistributedDataParallel) -> list[CommHook]:
    return [hook for hook, _ in model._comm_hooks if isinstance(hook, CommHook)]


def _hook_states(model: DistributedDataParallel) -> list[dict[str, Any]]:
    return [{"hook": type(hook).__name__, **hook.carried_state()} for hook in hooks_of(model)]


def _load(model: DistributedDataParallel, state: Mapping[str, Any], *, weights: bool) -> None:
    check_buckets(model, state["buckets"])
    hooks, states = hooks_of(model), state["hooks"]
    mine, theirs = [type(hook).__name__ for hook in hooks], [state["hook"] for state in states]
    if mine != theirs:
        theirs_text = f"on the healthy replica {theirs or 'none'}"
        raise RuntimeError(f"replicas differ in their communication hook: here it is {mine or 'none'}, {theirs_text}")
    if weights:
        model.module.load_state_dict(state["module"])
    for hook, carried in zip(hooks, states, strict=True):
        hook.start_over(carried)


def check_buckets(model: DistributedDataParallel, theirs: list[list[str]]) -> None:
    """RuntimeError unless the other replica groups the same parameters into buckets."""
    for index, (a, b) in enumerate(itertools.zip_longest(bucket_names(model), theirs)):
        if a != b:
            raise RuntimeError(
                f"replicas differ in bucket {index}: here it has {_shown(a)}, on the healthy replica {_shown(b)}. All "
                "must wrap the same model with the same options (bucket_cap_mb, dtypes, frozen parameters)."
            )


def register(manager: Manager, model: DistributedDataParallel, *, weights: bool) -> None:
    """Let the manager send the model's state to healing replicas; a manager that is too old sends nothing."""
    add = getattr(manager, "register_state_dict_fn", None)
    if add is None:
        return
    number = next(_counts.setdefault(manager, itertools.count()))
    alive = weakref.ref(model)
    buckets = bucket_names(model)  # once: they never change

    def save() -> dict[str, Any]:
        owner = alive()
        if owner is not None and weights:
            return state_dict(owner)
        return {"buckets": buckets, "hooks": [] if owner is None else _hook_states(owner)}

    def load(state: Mapping[str, Any]) -> None:
        owner = alive()
        if owner is not None:
            _load(owner, state, weights=weights)

    add(f"torchddp.{number}", load, save)


def _shown(names: list[str] | None) -> str:
    if names is None:
        return "nothing: there is no such bucket"
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} (parameters: {len(names)})"
