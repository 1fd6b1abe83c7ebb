"""Measures what a message costs on a group, in less than a second."""

from __future__ import annotations

import datetime
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.plan.step_profile import LinearCost
from torchddp.transport.agreement import TransportExchange
from torchddp.transport.message_cost import measure_line, seconds_of

_BUDGET_S = 0.6
_COPY_BYTES, _COPY_ROUNDS = 4 * 1024 * 1024, 15


def measure_cost(
    transport: _C.Transport,
    device: torch.device,
    timeout: datetime.timedelta = datetime.timedelta(0),
    *,
    host_too: bool = False,
) -> LinearCost:
    """Measure the time of an all-reduce and of a rank's own work for it. Collective; all ranks get rank 0's numbers.

    Takes about 0.6 s, and more only if the third message size (64 KiB, over shared memory 1 MiB) takes longer than a
    tenth of that. ``timeout``: of a message; zero: the transport's own. ``host_too``: also TCP's CPU time (0.2 s more).

    TransportError: a peer is gone. NoRoomError: no shared memory for the messages.
    """
    if transport.size == 1:
        return LinearCost(0.0, 0.0)
    line = measure_line(transport, device, timeout, _BUDGET_S)
    # On rank 0 only, so that no other rank competes for the core.
    asks_host = host_too and transport.rank == 0 and device.type == "cpu"
    host_alpha_s, host_beta_s = measure_host_cost() if asks_host else (0.0, 0.0)
    host_beta_s, host_alpha_s, pack_s = TransportExchange(transport, float, device, timeout).of_rank_0(
        [host_beta_s, host_alpha_s, _measure_copy(device)]
    )
    return LinearCost(line.alpha_s, line.beta_s_per_byte, host_beta_s, host_alpha_s, pack_s, line.misfit)


def _measure_copy(device: torch.device) -> float:
    """Seconds per byte to pack a gradient; 0 on a GPU, where packing does not delay the computation."""
    if device.type != "cpu":
        return 0.0
    copy = partial(torch.zeros(_COPY_BYTES // 4).copy_, torch.zeros(_COPY_BYTES // 4))
    return statistics.median(seconds_of(copy) for _ in range(_COPY_ROUNDS)) / _COPY_BYTES


# --- the CPU time of a message over TCP, whatever the link ---

_SMALL_BYTES, _SMALL_ROUNDS = 16 * 1024, 15
# Larger than the caches, as in a training step.
_LARGE_BYTES, _LARGE_ROUNDS = 16 * 1024 * 1024, 7
_HOST_TIMEOUT = datetime.timedelta(seconds=10)


def measure_host_cost() -> tuple[float, float]:
    """CPU seconds of one rank, per message and per byte, for gloo's all-reduce between two ranks. Not collective.

    Both ranks run in this process, connected over loopback: over a slow link the CPU wakes up for every packet, which
    does not predict a faster link. Takes about 0.2 s and 32 MiB. (0, 0) without gloo, or if the two can't connect.
    """
    if not dist.is_gloo_available():
        return 0.0, 0.0
    store = dist.HashStore()
    groups: list[Any]  # ProcessGroupGloo, whose collectives torch's stubs lack
    try:
        with ThreadPoolExecutor(2) as pool:  # each waits for the other to connect
            groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, _HOST_TIMEOUT), range(2)))
    except RuntimeError:
        return 0.0, 0.0
    # The minimum for small messages, because anything else that happens in the process takes longer than they do.
    small_s = min(_cpu_times_s(groups, _SMALL_BYTES, _SMALL_ROUNDS))
    per_byte_s = statistics.median(_cpu_times_s(groups, _LARGE_BYTES, _LARGE_ROUNDS)) / _LARGE_BYTES
    return max(0.0, small_s - per_byte_s * _SMALL_BYTES), per_byte_s


def _cpu_times_s(groups: list[Any], nbytes: int, rounds: int) -> list[float]:
    messages = [torch.ones(nbytes // 4) for _ in groups]
    times_s = []
    for _ in range(rounds):
        before_s = time.process_time()
        works = [group.allreduce([message]) for group, message in zip(groups, messages, strict=True)]
        for work in works:
            work.wait()
        times_s.append((time.process_time() - before_s) / len(groups))
    return times_s
