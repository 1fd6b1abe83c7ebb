"""Flat memory in which an optimizer's parameters lie, and flat memory in which they are to be stepped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchddp import _C


@dataclass(frozen=True, eq=False)
class OwnMemory:
    """Parameters are views of ``seen``; what changes in ``stepped``, a tensor of the same size, is to be seen there.

    Either one tensor twice, or the same memory mapped twice (`torchddp._C.Replicated`): then a parameter that is
    changed where it lies is this process's own affair.
    """

    seen: torch.Tensor
    stepped: torch.Tensor

    @property
    def is_shared(self) -> bool:
        """Whether parameters are stepped elsewhere than where they lie."""
        return self.stepped is not self.seen

    def holds(self, param: torch.Tensor) -> bool:
        """Whether the parameter lies here."""
        begin, seen = param.data_ptr() - self.seen.data_ptr(), self.seen
        inside = 0 <= begin and begin + param.numel() * param.itemsize <= seen.numel() * seen.itemsize
        return inside and param.dtype == seen.dtype and param.device == seen.device and begin % seen.itemsize == 0

    def offset_of(self, param: torch.Tensor) -> int:
        """Elements before the parameter's first."""
        return (param.data_ptr() - self.seen.data_ptr()) // self.seen.itemsize

    def counterpart(self, param: torch.Tensor) -> torch.Tensor:
        """A tensor like the parameter, at its place in ``stepped``."""
        return _C.make_flat_view(self.stepped, self.offset_of(param), param.detach())
