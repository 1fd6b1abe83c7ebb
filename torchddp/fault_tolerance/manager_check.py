"""What is asked of a torchft Manager before a model is given to it."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
import torch.distributed as dist

_NEEDED = ("allreduce", "current_step", "errored", "num_participants", "report_error")


class Manager(Protocol):
    """The part of `torchft.Manager` that models use; 0.2.0 and the nightlies of 2026 have it."""

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = ..., reduce_op: dist.ReduceOp.RedOpType = ...
    ) -> dist.Work:
        """In place; reports errors to the manager instead of raising them."""

    def current_step(self) -> int:
        """How many steps were committed; the same on all replicas that take part in a step."""

    def errored(self) -> Any:
        """What went wrong in this step, or None."""

    def num_participants(self) -> int:
        """Waits for the quorum; 0 before the first was started."""

    def report_error(self, e: Exception) -> None:
        """This step must not be committed."""


def check_manager(manager: object, who: str) -> None:
    """Raise unless ``manager`` can reduce gradients.

    Raises:
        TypeError: it is no torchft Manager (or something with its methods).
        ValueError: it was made without a process group.
    """
    missing = [name for name in _NEEDED if not callable(getattr(manager, name, None))]
    if inspect.isclass(manager) or missing:
        what = f"the class {manager.__name__}" if inspect.isclass(manager) else f"a {type(manager).__name__}"
        lacks = f", which has no {', '.join(missing)}" if missing else ""
        raise TypeError(f"{who}(manager, module): manager must be a torchft.Manager, got {what}{lacks}")
    if getattr(manager, "_pg", manager) is None:
        raise ValueError(
            f"{who}: this torchft Manager has no process group (pg=None). Make it with one that torchft can "
            "reconfigure: torchft.Manager(pg=torchft.ProcessGroupGloo(), ...), or ProcessGroupNCCL for CUDA."
        )
