"""Waiting for what other ranks put into a store."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

import torch.distributed as dist

__all__ = ["wait_for_keys"]

_SLICE_S = 0.25


def wait_for_keys(store: dist.Store, keys: Sequence[str], timeout: datetime.timedelta) -> None:
    """As ``store.wait(keys, timeout)``, but handlers of signals run meanwhile, and what they raise ends it.

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
