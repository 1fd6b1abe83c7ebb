"""A module's buffers and weights: which there are, and whether they can travel in one message."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from torchddp import _C
from torchddp.ddp.local_tensors import local_of


def buffers_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """Each buffer once, in the order of ``module.buffers()``; in less time, for every forward does this."""
    found = _C.module_buffers(module)
    return found if _C.can_travel_as_bytes(found) else [local_of(buffer) for buffer in found]


def states_of(module: torch.nn.Module, ignored: Collection[str], *, buffers: bool) -> Iterator[torch.Tensor]:
    """What all ranks of a wrapped module start from: parameters, and buffers if wanted."""
    for name, parameter in module.named_parameters():
        if name not in ignored:
            yield local_of(parameter).detach()
    for name, buffer in module.named_buffers() if buffers else ():
        if name not in ignored:
            yield local_of(buffer).detach()
