"""Waits of the main thread that run signal handlers, and end with any exception that one raises.

torch's own waits delay handlers until they return. For C++ see Note [Signals in a wait] in csrc/common/signals.h.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchddp import _C

_SLICE_S = 0.25


def wait_for_work(work: Any, process_group: dist.ProcessGroup | None) -> None:
    """Like ``work.wait()``, for an operation of this group (None: the default one).

    Runs handlers meanwhile if the group is gloo's.
    """
    process_group = process_group if process_group is not None else dist.group.WORLD
    if isinstance(work, dist.Work) and isinstance(process_group, dist.ProcessGroup):
        _C.wait_for_work(work, process_group)
    else:
        work.wait()  # not one of torch's


def wait_for_future(future: torch.futures.Future[Any], limit_s: float) -> bool:
    """Wait until the future is complete, successfully or not; False if that takes longer."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(min(limit_s, threading.TIMEOUT_MAX))


def wait_for_keys(store: Store, keys: Sequence[str], timeout: datetime.timedelta) -> None:
    """Like ``store.wait(keys, timeout)``.

    Raises:
        RuntimeError: as torch's stores do, if the time is up or the store can't be reached.
    """
    deadline_s = time.monotonic() + timeout.total_seconds()
    while True:
        begun_s = time.monotonic()
        slice_s = min(_SLICE_S, max(0.001, deadline_s - begun_s))
        try:
            store.wait(list(keys), datetime.timedelta(seconds=slice_s))
            return
        except RuntimeError:
            now_s = time.monotonic()
            # It failed before its own limit, so not because of time.
            if now_s >= deadline_s or now_s - begun_s < slice_s * 0.9:
                raise
