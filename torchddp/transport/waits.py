"""Waits of the main thread during which handlers of signals run, and which end with what those raise.

torch's own hold handlers up until they are over. In C++: Note [Signals in a wait] in csrc/common/signals.h.
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
    """As ``work.wait()``, for an operation of this group (None: the default one).

    Handlers run meanwhile if the group is gloo's.
    """
    process_group = process_group if process_group is not None else dist.group.WORLD
    if isinstance(work, dist.Work) and isinstance(process_group, dist.ProcessGroup):
        _C.wait_for_work(work, process_group)
    else:
        work.wait()  # of somebody who is none of torch's


def wait_for_future(future: torch.futures.Future[Any], limit_s: float) -> bool:
    """Until the future is complete, well or not; False if that takes longer."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(min(limit_s, threading.TIMEOUT_MAX))


def wait_for_keys(store: Store, keys: Sequence[str], timeout: datetime.timedelta) -> None:
    """As ``store.wait(keys, timeout)``.

    Raises:
        RuntimeError: as torch's stores do, when the time is over or the store can't be reached.
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
            # Sooner than its own limit: it is no matter of time.
            if now_s >= deadline_s or now_s - begun_s < slice_s * 0.9:
                raise
