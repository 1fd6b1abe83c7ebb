"""The optimizers and schedulers of a LightningModule, with sharded state."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from torchddp.sharded.oss import OSS

__all__ = ["follow", "shard"]

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def shard(optimizer: Optimizer) -> OSS:
    """An OSS in the place of an optimizer: its class, options, groups (the same dicts), hooks and state. Collective.

    An OSS is left as it is. Raises TypeError for a class that can't be made again from its ``defaults``, or that OSS
    refuses.
    """
    if isinstance(optimizer, OSS):
        return optimizer
    kind = type(optimizer)
    sharded = OSS(optimizer.param_groups, optim=kind, **_arguments(optimizer))
    for name in _HOOKS:
        getattr(sharded, name).update(getattr(optimizer, name, {}))
    if optimizer.state:
        sharded.load_state_dict(optimizer.state_dict())
    return sharded


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """What its constructor was called with: of ``defaults`` what it takes (AdamW's have an entry of Adam's)."""
    kind = type(optimizer)
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(optimizer.defaults)
    names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    missing = [
        p.name for p in parameters if p.name in names and p.default is p.empty and p.name not in optimizer.defaults
    ]
    if missing:
        raise TypeError(
            f"torchddp_sharded can't make another {kind.__name__}: its argument {missing[0]!r} is not among its "
            f"defaults. Return torchddp.optim.OSS(params, optim={kind.__name__}, ...) from configure_optimizers"
        )
    return {name: optimizer.defaults[name] for name in names if name in optimizer.defaults}


def follow(schedulers: Iterable[Any], replaced: list[tuple[Optimizer, OSS]]) -> None:
    """Lets schedulers, and those inside of them, look at the optimizers that took the places of theirs."""
    for scheduler in schedulers:
        for old, new in replaced:
            if getattr(scheduler, "optimizer", None) is old and new is not old:
                scheduler.optimizer = new
                if hasattr(old.step, "_wrapped_by_lr_sched"):
                    _note_steps(new)
        follow(getattr(scheduler, "_schedulers", ()), replaced)


def _note_steps(optimizer: OSS) -> None:
    """As schedulers do with the optimizer they are made for; they warn that its step() was not called otherwise."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    owner = weakref.ref(optimizer)

    @functools.wraps(optimizer.step)
    def step(*arguments: Any, **more: Any) -> Any:
        live: Any = owner()
        live._opt_called = True
        return type(live).step(live, *arguments, **more)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
