"""MosaicML's Composer with torchddp's class: its Trainer wraps models in it, its sync strategies reduce in buckets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from torchddp.ddp.former_names import current
from torchddp.ddp.module import OPTIONS, DistributedDataParallel
from torchddp.ddp.options import SyncChoice
from torchddp.integrations import require
from torchddp.sync import prepare_ddp_module, sync_context

if TYPE_CHECKING:
    from composer.core import State

# Where Composer's two functions are looked up. The trainer has imported them by name.
_PLACES = ("composer.trainer.trainer", "composer.distributed", "composer.distributed.dist_strategy")
_FUNCTIONS = ("prepare_ddp_module", "ddp_sync_context")

_originals: dict[tuple[str, str], Callable[..., Any]] = {}
_options: dict[str, Any] = {}


def enable(**options: object) -> ExitStack:
    """Make Composer's trainers wrap models in torchddp's DistributedDataParallel from now on.

        torchddp.integrations.composer.enable(transport="shm")
        trainer = composer.Trainer(model=model, ddp_sync_strategy="forced_sync", ...)

    Composer's three sync strategies become torchddp's of the same names: FORCED_SYNC reduces packed buckets instead of
    sending one message per parameter. Models that are already wrapped don't change. In a ``with`` statement, the
    previous state is restored at the end. Not collective, but every rank must call it before it creates its Trainer.

    Args:
        options: of torchddp's class and torch's; they replace those of an earlier call. Not
            ``find_unused_parameters``, which Composer's algorithms decide.

    Raises:
        ImportError: Composer is not installed, or lacks a function that this replaces.
        TypeError: an option that the class does not have.
    """
    options = current(options, [name for name in OPTIONS if name != "find_unused_parameters"], "enable")
    before = dict(_options) if enabled() else None
    if before is None:
        _replace({place: require(place, "mosaicml") for place in _PLACES})
    _options.clear()
    _options.update(options)
    at_end = ExitStack()
    at_end.callback(disable if before is None else partial(enable, **before))
    return at_end


def disable() -> None:
    """Restore Composer's own functions. Does nothing without `enable`."""
    for (place, name), function in _originals.items():
        setattr(require(place, "mosaicml"), name, function)
    _originals.clear()
    _options.clear()


def enabled() -> bool:
    """Whether Composer's trainers wrap models in torchddp's class."""
    return bool(_originals)


def _replace(modules: dict[str, ModuleType]) -> None:
    ours: dict[str, Callable[..., Any]] = {"prepare_ddp_module": _prepare, "ddp_sync_context": _sync_context}
    if missing := [f"{place}.{name}" for place in modules for name in _FUNCTIONS if not hasattr(modules[place], name)]:
        raise ImportError(f"this Composer has no {', '.join(missing)}, as 0.32 has: use that, and please report this")
    for place, module in modules.items():
        for name in _FUNCTIONS:
            _originals[place, name] = getattr(module, name)
            setattr(module, name, ours[name])


def _prepare(module: torch.nn.Module, find_unused_parameters: bool) -> torch.nn.Module:
    return prepare_ddp_module(module, find_unused_parameters, **_options)


def _sync_context(state: State, is_final_microbatch: bool, sync_strategy: SyncChoice) -> AbstractContextManager[None]:
    if _originals and not isinstance(state.model, DistributedDataParallel):  # wrapped before, or not at all
        original = _originals["composer.distributed.dist_strategy", "ddp_sync_context"]
        context: AbstractContextManager[None] = original(state, is_final_microbatch, sync_strategy)
        return context
    strategy = getattr(sync_strategy, "value", sync_strategy)  # Composer's own enum
    return sync_context(state.model, is_final_microbatch, strategy)
