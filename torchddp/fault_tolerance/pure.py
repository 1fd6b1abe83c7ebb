"""torchft's PureDistributedDataParallel: one all-reduce per parameter, without a reducer."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchddp import _torch
from torchddp.fault_tolerance.manager import Manager, check_manager, count_participants


class PureDistributedDataParallel(nn.Module):
    """Starts one ``Manager.allreduce`` for each gradient as soon as it is final, and waits for all of them before
    ``backward()`` returns. (torchft's class never waits: its futures are lazy, and averages stay sums.)

    For models that the reducer doesn't support; :class:`DistributedDataParallel` is faster. Every backward reduces:
    there is no ``no_sync()``. All replicas must use the same parameters in the same order. After an error,
    ``backward()`` returns and ``should_commit()`` returns False, as with torchft's class.

    Args:
        manager: a ``torchft.Manager``.
        module: may be on several devices.

    Raises:
        TypeError: ``manager`` is not a Manager.
        ValueError: it has no process group.
        RuntimeError: backward before ``manager.start_quorum()``.
        TransportError: in backward: there was no quorum within the manager's time limits.
    """

    def __init__(self, manager: Manager, module: nn.Module) -> None:
        super().__init__()
        check_manager(manager, "PureDistributedDataParallel")
        self.module = module
        sums = _Averages(manager)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(sums.start)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """``module(*args, **kwargs)``."""
        return self.module(*args, **kwargs)


class _Averages:
    """The averages in flight in the current backward."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._lock = threading.Lock()  # hooks of several devices run in several threads
        self._works: list[dist.Work] = []
        self._backward: int | None = None

    def start(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        with self._lock:
            backward = _torch.graph_task()
            if backward != self._backward:
                count_participants(self._manager)  # raises, with the reason, if there is no quorum
                # A backward that ended with an error never reached its end.
                self._works, self._backward = [], backward
                _torch.at_end_of_backward(self.finish)
            self._works.append(self._manager.allreduce(parameter.grad))

    def finish(self) -> None:
        works, self._works, self._backward = self._works, [], None
        for work in works:
            work.wait()  # False after an error, which the manager has recorded
