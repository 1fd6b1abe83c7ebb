"""The parameters that a method averages: named, and verified to be the same on all ranks."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchddp import _C
from torchddp.transport.agreement import Agreement, in_words

Named = dict[str, torch.Tensor]
_MESSAGE_BYTES = 25 * 1024 * 1024
# A module, its parameters with or without names, or an optimizer's groups.
ParamSource = nn.Module | Iterable[Any]


def named_parameters(source: ParamSource) -> Named:
    """The trainable parameters, each once, in order; unnamed ones are "params[3]". TypeError for anything else."""
    if isinstance(source, torch.Tensor):
        kinds = "a module, or an iterable of parameters, named parameters or groups"
        raise TypeError(f"params must be {kinds}, got a tensor")
    if isinstance(source, nn.parallel.DistributedDataParallel):
        source = source.module  # with the bare module's names, so that checkpoints are interchangeable
    pairs = source.named_parameters() if isinstance(source, nn.Module) else _pairs(source)
    found: Named = {}
    seen: set[int] = set()
    for name, param in pairs:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"{name} must be a parameter, got {type(param).__name__}")
        if param.requires_grad and param.numel() > 0 and id(param) not in seen:
            seen.add(id(param))
            found[name] = param
    return found


def _pairs(items: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    index = 0
    for item in items:
        if isinstance(item, Mapping):
            params = list(item["params"])
            names = item.get("param_names", [f"params[{index + i}]" for i in range(len(params))])
            yield from zip(names, params, strict=True)
            index += len(params)
        else:
            yield item if isinstance(item, tuple) else (f"params[{index}]", item)
            index += 1


def named_buffers(source: ParamSource, wanted: bool) -> Named:
    """The floating-point buffers of a module, such as running statistics; none unless ``wanted``."""
    if not wanted:
        return {}
    if not isinstance(source, nn.Module):
        raise TypeError(f"buffers=True needs a module as params, got {type(source).__name__}")
    return {name: b for name, b in source.named_buffers() if b.is_floating_point() and b.numel() > 0}


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory, as a 1-d view of real numbers; the tensor must be dense."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.as_strided((real.numel(),), (1,), real.storage_offset())


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are summed: at least fp32, real."""
    return torch.promote_types(torch.float32, dtype.to_real())


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def problem_of(named: Named) -> ValueError | None:
    """Why this rank can't average these; None if it can."""
    if not named:
        return ValueError("there is no parameter to average: none was given, or none has requires_grad")
    device = next(iter(named.values())).device
    for name, tensor in named.items():
        if tensor.device != device:
            first = next(iter(named))
            return ValueError(f"parameter '{name}' is on {tensor.device}, '{first}' on {device}: use one device")
        if tensor.is_sparse or not _is_dense(tensor):
            return ValueError(
                f"parameter '{name}' (shape {list(tensor.shape)}, strides {list(tensor.stride())}) leaves gaps in its "
                "memory or overlaps itself, and can't be averaged in place: make it contiguous()"
            )
    return None


def verify_same(named: Named, agreement: Agreement, options: Mapping[str, object]) -> None:
    """Collective. On every rank RuntimeError unless all have the same parameters, ValueError for different options."""
    if problem := problem_of(named):
        raise problem
    lines = [f"'{n}' {p.dtype}{list(p.shape)} with strides {list(p.stride())}" for n, p in named.items()]
    agreement.verify(lines, {name: in_words(value) for name, value in options.items()})


def broadcast_from_first(named: Named, process_group: dist.ProcessGroup) -> None:
    """Collective. Copy the values of the group's rank 0 to all ranks."""
    if process_group.size() > 1:
        broadcast = _C.TensorBroadcast(_C.C10dTransport(process_group), _MESSAGE_BYTES, datetime.timedelta(0))
        broadcast.run([tensor.detach() for tensor in named.values()], 0)


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``process_group``, or the default one. RuntimeError if there is none, or it can't average."""
    group = process_group if process_group is not None or not dist.is_initialized() else dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    if (refusal := getattr(group, "refusal", None)) is not None:  # set on groups that can't average
        raise RuntimeError(refusal)
    return group
