"""What the wrapper must know of the model it wraps: its parameters, wrappers inside it, changes made to it later."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C
from torchddp.errors import warn_user


def describe_changes(ddp: TorchDDP, reduced_ids: Collection[int]) -> str:
    """What was done to a model after it was wrapped, in words; empty if nothing was.

    ``reduced_ids``: of the parameters whose gradients are reduced.
    """
    known = {id(p) for p in ddp._module_parameters}
    current = {n: p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore}
    added = [n for n, p in current.items() if id(p) not in known]
    removed = len(known - {id(p) for p in current.values()})
    frozen = [n for n, p in current.items() if not p.requires_grad and id(p) in reduced_ids]
    parts = []
    if added or removed:
        parts.append(
            f"{removed} parameters were removed or replaced, and these are new: {', '.join(added[:8]) or 'none'}"
        )
    if frozen:
        parts.append(f"these no longer require grad: {', '.join(frozen[:8])}")
    return f"The model was changed after it was wrapped ({'; '.join(parts)}): wrap it again." if parts else ""


def wrapped_inside(module: torch.nn.Module) -> list[TorchDDP]:
    """DDP modules inside ``module`` whose parameters would be reduced twice.

    Raises:
        ValueError: the gradients of one are views of another class's buckets, where two reducers spoil each other's.
    """
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    mine = {id(p) for n, p in module.named_parameters() if n not in ignored and p.requires_grad}
    inner = [
        m for m in module.modules() if isinstance(m, TorchDDP) and any(id(p) in mine for p in m._module_parameters)
    ]
    for other in inner:
        # Ours are told to copy instead (``_share_gradients_with``); torch's can't be told once they are made.
        if other.gradient_as_bucket_view and not _has_our_reducer(other):
            raise ValueError(
                "DistributedDataParallel can't wrap a model in which torch.nn.parallel.DistributedDataParallel with "
                "gradient_as_bucket_view=True wraps the same parameters: both would average the same gradients, in "
                "memory of one of them. Wrap once: give this class the model itself (its .module)."
            )
    if inner:
        warn_user(
            "DistributedDataParallel wraps a model that is already wrapped: its gradients are reduced twice, at twice "
            "the cost, and kept outside of buckets. Wrap once (trainers such as Accelerate wrap in prepare())."
        )
    return inner


def _has_our_reducer(ddp: Any) -> bool:
    return isinstance(ddp.reducer, _C.Reducer)


def check_outer(ddp: TorchDDP, outer: TorchDDP | None) -> None:
    """Before the first forward of ``ddp``, inside the forward of ``outer``, if that is there.

    Raises:
        RuntimeError: torch's class wraps the same parameters, and their gradients are views of ``ddp``'s buckets.
    """
    if outer is None or _has_our_reducer(outer):
        return  # ours has seen to it when it was made
    shared = {id(p) for p in ddp._module_parameters} & {id(p) for p in outer._module_parameters}
    if not shared:
        return
    what = (
        "torch.nn.parallel.DistributedDataParallel wraps a model that is already wrapped by torchddp, so its gradients "
        "are averaged twice"
    )
    once = "Wrap once (trainers such as Accelerate wrap in prepare(): give it the model itself)."
    if ddp.gradient_as_bucket_view:
        raise RuntimeError(f"{what}, in the same memory, with wrong results. {once}")
    warn_user(f"{what}, at twice the cost. {once}")


def param_specs(
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    sparse: Sequence[bool],
    owners: Sequence[int] | None = None,
) -> list[_C.ParamSpec]:
    """The parameters as the reducer and the planner know them."""
    owners = owners if owners is not None else [-1] * len(parameters)
    dtypes = {dtype: i for i, dtype in enumerate(dict.fromkeys(p.dtype for p in parameters))}
    devices = {device: i for i, device in enumerate(dict.fromkeys(p.device for p in parameters))}
    return [
        _C.ParamSpec(
            name=name,
            numel=p.numel(),
            itemsize=p.element_size(),
            dtype=dtypes[p.dtype],
            device=devices[p.device],
            sparse=is_sparse,
            owner=owner,
        )
        for p, name, is_sparse, owner in zip(parameters, names, sparse, owners, strict=True)
    ]
