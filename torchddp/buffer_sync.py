"""A module's buffers and weights: which there are, and whether they can travel in one message."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from torchddp.local_tensors import local_of


def supports(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these can travel as bytes: ordinary dense tensors of one device."""
    first = tensors[0].device
    return first.type != "meta" and all(
        t.layout == torch.strided and t.device == first and type(t) in (torch.Tensor, torch.nn.Parameter)
        for t in tensors
    )


def buffers_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Each buffer once, in the order of ``module.buffers()``; in less time, for every forward does this."""
    found: dict[int, torch.Tensor] = {}
    _collect(module, set(), found)
    return list(found.values())


def _collect(module: torch.nn.Module, seen: set[int], found: dict[int, torch.Tensor]) -> None:
    seen.add(id(module))
    for buffer in module._buffers.values():
        if buffer is not None:
            found.setdefault(id(buffer), local_of(buffer))
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            _collect(child, seen, found)


def states_of(module: torch.nn.Module, ignored: Collection[str], *, buffers: bool) -> Iterator[torch.Tensor]:
    """What all ranks of a wrapped module start from: parameters, and buffers if wanted."""
    for name, parameter in module.named_parameters():
        if name not in ignored:
            yield local_of(parameter).detach()
    for name, buffer in module.named_buffers() if buffers else ():
        if name not in ignored:
            yield local_of(buffer).detach()
