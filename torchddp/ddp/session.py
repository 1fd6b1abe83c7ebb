"""What the observers of a model's steps know of it."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchddp import _C
from torchddp.ddp.local_tensors import local_of


@dataclass(eq=False)
class ModelSession:
    """The `torchddp.diagnose.session.Session` of a DistributedDataParallel, which owns it."""

    model: weakref.ref[Any]
    reducer: _C.Reducer
    specs: Sequence[_C.ParamSpec]
    parameters: Sequence[torch.Tensor]
    process_group: Any
    is_copy: bool
    device: torch.device
    wait_limit: datetime.timedelta
    rank: int = 0
    joins: bool = False
    synchronises: bool = True

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        model: Any = self.model()
        ignored = model.parameters_to_ignore
        return [(name, local_of(p)) for name, p in model.module.named_parameters() if name not in ignored]
