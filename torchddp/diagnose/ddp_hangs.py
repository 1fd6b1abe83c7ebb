"""Hang reports of a DistributedDataParallel: what its monitor must know of it."""

from __future__ import annotations

import datetime
import hashlib
import logging
from typing import Any

from torch.distributed.distributed_c10d import _world

from torchddp.ddp import model_check
from torchddp.diagnose import stall_limit
from torchddp.diagnose.hang_monitor import HangMonitor, Subject
from torchddp.transport import select
from torchddp.transport.board import Board

logger = logging.getLogger("torchddp.hang")


def limit_s(stall_report_s: float | None, timeout: datetime.timedelta | None, process_group: Any, device: str) -> float:
    """Seconds of waiting after which ranks report; 0: they don't. ValueError: see `stall_limit.choose`."""
    longest = timeout or select.group_timeout(process_group, device)
    return stall_limit.choose(stall_report_s, longest.total_seconds())


def start(model: Any, stall_s: float) -> HangMonitor | None:
    """The monitor of the model's waits over its process group as it is now; None if there is nobody to talk to.

    Not collective, but all ranks must make as many, in the same order.
    """
    group = model.process_group
    if stall_s == 0 or group.size() == 1:
        return None
    registered = group in _world.pg_map

    def is_over() -> bool:
        return registered and group not in _world.pg_map

    try:
        board = Board(group, "hang")
    except RuntimeError as error:
        logger.debug("no hang reports: %s", error)
        return None
    return HangMonitor(board, Subject(model, is_over, _describe), stall_s)


def _describe(model: Any) -> tuple[str, list[str]]:
    names = [spec.name for spec in model._specs]
    parameters = [str(description) for description in model_check.describe(model._reduced_params, names)]
    return hashlib.sha256("\n".join(parameters).encode()).hexdigest(), parameters
