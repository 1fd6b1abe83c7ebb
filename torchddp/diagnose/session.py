"""What the parts that look after a model's steps must know of it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from torchddp import _C


class Session(Protocol):
    """A model over a process group. What a thread of ours looks at is held weakly, so that the model can go.

    Attributes:
        specs: of the parameters that are reduced.
        is_copy: of another model (pickle, deepcopy), which one rank alone may have made: it keeps to itself.
        device: of the parameters that are reduced.
        wait_limit: how long a reduction may take; zero: as long as the process group says.
        joins: `join()` is on, under which ranks make different numbers of steps.
        synchronises: the gradients of the step to come are reduced.
    """

    reducer: _C.Reducer
    specs: Sequence[_C.ParamSpec]
    parameters: Sequence[torch.Tensor]
    rank: int
    process_group: Any
    is_copy: bool
    device: torch.device
    wait_limit: datetime.timedelta
    joins: bool
    synchronises: bool

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All that the module has now, frozen ones too, but those that the model was told to ignore. Local tensors."""
