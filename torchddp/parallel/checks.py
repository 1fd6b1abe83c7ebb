"""What a ParallelConfig may hold, and which of its options go together."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchddp.parallel.config import ParallelConfig

# Set by parallelize itself, or under other names.
_NOT_FOR_USERS = {
    "self": "",
    "module": "",
    "sharded_optimizer": "parallelize's optimizer",
    "process_group": "model_parallel, data_parallel and parallel_backend",
    "device_mesh": "model_parallel and data_parallel",
    "init_sync": "sync_module_states",
    "sync_models_at_startup": "sync_module_states",
}
_FSDP_ONLY = ("cpu_offload", "param_dtype", "reduce_dtype", "wrap", "forward_prefetch", "backward_prefetch")


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say after an unknown name: the nearest one that there is, and all that are allowed."""
    names = list(names)
    known = {candidate.lower(): candidate for candidate in names}
    text = name.lower().replace("-", "_")
    close = difflib.get_close_matches(text, list(known), n=1)
    close = close or [candidate for candidate in known if len(text) > 2 and text in candidate]
    meant = f"; did you mean '{known[close[0]]}'?" if close else ""
    return f"{meant} (allowed: {', '.join(names)})"


def check_one_of(name: str, value: str | None, allowed: tuple[str, ...], optional: bool = False) -> None:
    """ValueError unless ``value`` is one of ``allowed``, or None if ``optional``."""
    if value not in allowed and not (optional and value is None):
        raise ValueError(f"{name}: got '{value}'{nearest(str(value), allowed)}")


def check_types(config: ParallelConfig) -> None:
    """TypeError or ValueError for a field of another type, or a number out of its range."""
    for name in ("use_fsdp", "cpu_offload", "sync_module_states"):
        _require(name, getattr(config, name), isinstance(getattr(config, name), bool), "true or false")
    for name in ("kind", "sharding_strategy", "parallel_backend", "device_type", "param_dtype", "reduce_dtype"):
        value, wanted = getattr(config, name), "a string" if name == "kind" else "a string or none"
        _require(name, value, isinstance(value, str) or (value is None and name != "kind"), wanted)
    for name, least in (("model_parallel", 1), ("data_parallel", 1), ("forward_prefetch", 0), ("backward_prefetch", 0)):
        value = getattr(config, name)
        if value is None and least == 1:
            continue
        _require(name, value, isinstance(value, int) and not isinstance(value, bool), "a whole number")
        if value < least:
            raise ValueError(f"{name}: got {value}, allowed: {least} or more")
    wrap = config.wrap
    _require("wrap", wrap, wrap is None or isinstance(wrap, tuple), "a list of classes or names of classes, or none")
    for item in wrap or ():
        is_class = isinstance(item, type) and issubclass(item, torch.nn.Module)
        _require("wrap", item, is_class or isinstance(item, str), "classes of modules, or their names")
    _require("ddp", config.ddp, isinstance(config.ddp, Mapping), "a table of options")


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), allowed: {wanted}")


def check_together(config: ParallelConfig) -> None:
    """ValueError for options that don't go together in a world of any size."""
    kind, strategy = config.kind, config.sharding_strategy
    if config.use_fsdp and kind in ("none", "ddp", "sharded"):
        raise ValueError(f"use_fsdp with kind '{kind}': leave one out, or take kind 'fsdp' or 'hsdp'")
    with_fsdp = config.use_fsdp or kind in ("fsdp", "hsdp")
    if strategy is not None and not with_fsdp:
        raise ValueError(f"sharding_strategy '{strategy}' without use_fsdp: set use_fsdp, or leave the strategy out")
    if kind == "hsdp" and strategy is not None and not strategy.startswith("HYBRID_SHARD"):
        raise ValueError(f"kind 'hsdp' with sharding_strategy '{strategy}': allowed: HYBRID_SHARD, HYBRID_SHARD_ZERO2")
    if config.cpu_offload and not with_fsdp:
        raise ValueError(
            f"cpu_offload with kind '{config.chosen_kind}': nothing is offloaded here; take use_fsdp (torch's FSDP2) "
            "or DeepSpeed"
        )
    for name in _FSDP_ONLY:
        if not with_fsdp and getattr(config, name) not in (None, 0, False):
            raise ValueError(f"{name} with kind '{config.chosen_kind}': it is an option of FSDP; set use_fsdp")
    if with_fsdp and config.ddp:
        raise ValueError(f"ddp.{next(iter(config.ddp))} with FSDP: options of DistributedDataParallel have no effect")
    if kind == "sharded" and (config.model_parallel or 1) > 1:
        raise ValueError(f"model_parallel {config.model_parallel} with kind 'sharded': take 'ddp', 'fsdp' or 'hsdp'")
    if config.ddp:
        _check_ddp_options(config.chosen_kind, config.ddp)


def _check_ddp_options(kind: str, options: Mapping[str, Any]) -> None:
    if kind == "none":
        raise ValueError(f"ddp.{next(iter(options))} with kind 'none': there is no DistributedDataParallel")
    if kind == "sharded":
        from torchddp.sharded import ShardedDataParallel as Wrapper
    else:
        from torchddp.ddp.module import DistributedDataParallel as Wrapper  # type: ignore[assignment]
    parameters = inspect.signature(Wrapper.__init__).parameters
    allowed = [name for name in parameters if name not in _NOT_FOR_USERS]
    for name in map(str, options):
        if _NOT_FOR_USERS.get(name):
            raise ValueError(f"ddp.{name}: use {_NOT_FOR_USERS[name]} instead")
        if name not in allowed:
            raise ValueError(f"ddp.{name}: unknown option of {Wrapper.__name__}{nearest(name, allowed)}")
