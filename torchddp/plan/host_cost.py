"""What the CPU has to do for a message that TCP carries, however fast the link is."""

from __future__ import annotations

import datetime
import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

_SMALL_BYTES, _SMALL_ROUNDS = 16 * 1024, 15
# More than caches hold, as in a training step.
_LARGE_BYTES, _LARGE_ROUNDS = 16 * 1024 * 1024, 7
_TIMEOUT = datetime.timedelta(seconds=10)


def measure_host_cost() -> tuple[float, float]:
    """CPU seconds of one rank per message and per byte of gloo's all-reduce between two ranks; about 0.2 s, and 32 MiB
    meanwhile.

    Both ranks are this process, connected over its own loopback interface: over a slow link the same CPU wakes up for
    every packet, so what it needs there says nothing of a faster one. Not collective. (0, 0) without gloo.
    """
    if not dist.is_gloo_available():
        return 0.0, 0.0
    store = dist.HashStore()
    groups: list[Any] = []  # of class ProcessGroupGloo, whose collectives torch's stubs don't know
    # Each waits for the other to connect.
    threads = [
        threading.Thread(target=lambda rank=rank: groups.append(dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(groups) < 2:
        return 0.0, 0.0
    # Of the small ones the least: whatever else happens in the process is larger than they are.
    small_s = min(_cpu_times_s(groups, _SMALL_BYTES, _SMALL_ROUNDS))
    per_byte_s = statistics.median(_cpu_times_s(groups, _LARGE_BYTES, _LARGE_ROUNDS)) / _LARGE_BYTES
    return max(0.0, small_s - per_byte_s * _SMALL_BYTES), per_byte_s


def _cpu_times_s(groups: list[Any], nbytes: int, rounds: int) -> list[float]:
    """CPU time of one rank for one all-reduce, `rounds` times."""
    messages = [torch.ones(nbytes // 4) for _ in groups]
    times_s = []
    for _ in range(rounds):
        before_s = time.process_time()
        works = [group.allreduce([message]) for group, message in zip(groups, messages, strict=True)]
        for work in works:
            work.wait()
        times_s.append((time.process_time() - before_s) / len(groups))
    return times_s
