"""What this rank holds of a DTensor: all that the engine works with."""

from __future__ import annotations

import sys
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(tensor: torch.Tensor) -> bool:
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of a DTensor this rank's part: the same memory, without a graph. Not collective."""
    if not is_dtensor(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]  # to_local() would make a Parameter of it
    # A collective may still be on its way to it.
    return local.wait() if hasattr(local, "trigger_wait") else local
