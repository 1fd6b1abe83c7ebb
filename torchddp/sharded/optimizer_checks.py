"""What ShardedDataParallel asks of its optimizers: an owner for each trainable parameter of the module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from torchddp.sharded.oss import OSS

MAX_NAMES = 8


def describe(module: torch.nn.Module, optimizers: Sequence[OSS]) -> list[str]:
    """One line for each parameter: what must agree between ranks."""
    owners = {param: rank for optimizer in optimizers for param, rank in optimizer.param_to_rank.items()}
    return [
        f"'{name}' {list(param.shape)}, {f'of rank {owners[param]}' if param in owners else 'frozen'}"
        for name, param in module.named_parameters()
    ]


def check_optimizers(given: OSS | Sequence[OSS], process_group: dist.ProcessGroup) -> list[OSS]:
    """The optimizers as a list. TypeError for what is no OSS, ValueError for one of another group or given twice."""
    optimizers = [given] if isinstance(given, OSS) or not isinstance(given, Sequence) else list(given)
    if not optimizers:
        raise ValueError("ShardedDataParallel needs an optimizer: torchddp.optim.OSS, or a list of them")
    for optimizer in optimizers:
        if not isinstance(optimizer, OSS):
            raise TypeError(
                "ShardedDataParallel needs optimizers that know which rank owns a parameter, torchddp.optim.OSS, got "
                f"{type(optimizer).__qualname__}: OSS(params, optim=torch.optim.AdamW, lr=1e-3)"
            )
        if optimizer.is_attached:
            raise ValueError(
                "the optimizer belongs to another ShardedDataParallel already: make a new one for this module, and "
                "load its state"
            )
        if optimizer.process_group is not process_group:
            raise ValueError(
                f"the optimizer is sharded over another process group ({optimizer.world_size} ranks) than the module "
                f"({process_group.size()} ranks): pass the same group to both"
            )
    if len({id(optimizer) for optimizer in optimizers}) != len(optimizers):
        raise ValueError("an optimizer is given twice")
    return optimizers


def check_coverage(module: torch.nn.Module, ignored: Iterable[str], optimizers: Sequence[OSS]) -> None:
    """ValueError unless each trainable parameter of the module is in exactly one optimizer, and no other is in any."""
    names = {param: name for name, param in module.named_parameters()}
    skipped = set(ignored)
    held_by: dict[torch.Tensor, int] = {}
    for number, optimizer in enumerate(optimizers):
        strangers = []
        for group_number, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param not in names:
                    strangers.append(f"parameter {place} of group {group_number} (shape {list(param.shape)})")
                elif param in held_by:
                    raise ValueError(
                        f"parameter '{names[param]}' is in optimizer {held_by[param]} and in optimizer {number}: each "
                        "must belong to one"
                    )
                held_by[param] = number
        if strangers:
            raise ValueError(
                f"optimizer {number} holds {len(strangers)} parameters that are not the module's: {_some(strangers)}. "
                "Build it over the parameters of the module that is wrapped"
            )
    missing = [n for p, n in names.items() if p.requires_grad and p not in held_by and n not in skipped]
    if missing:
        raise ValueError(
            f"{len(missing)} trainable parameters are in no optimizer: {_some([repr(n) for n in missing])}. Give them "
            "to one, or freeze them (requires_grad=False)"
        )


def owners_of(parameters: Sequence[torch.Tensor], optimizers: Sequence[OSS]) -> list[int]:
    """The rank that owns each parameter. RuntimeError if one has none: it was thawed without `refresh_trainable`."""
    found: dict[torch.Tensor, int] = {}
    for optimizer in optimizers:
        found.update(optimizer.param_to_rank)
    unowned = [f"parameter {i} (shape {list(p.shape)})" for i, p in enumerate(parameters) if p not in found]
    if unowned:
        raise RuntimeError(
            f"{len(unowned)} trainable parameters have no owner: {_some(unowned)}. Call refresh_trainable() of the "
            "ShardedDataParallel on all ranks after thawing parameters"
        )
    return [found[param] for param in parameters]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
