"""What one message costs on this group: measured in less than a second, the same answer on all ranks."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.plan.step_profile import LinearCost
from torchddp.transport.agreement import TransportExchange

_FIRST_BYTES, _GROWTH, _LAST_BYTES = 4096, 4, 16 * 1024 * 1024
# Shared memory is as fast at a megabyte as beyond it, and there is less of it.
_LAST_SHARED_BYTES = 1024 * 1024
_BUDGET_S = 0.6
_LEAST_SIZES, _MAX_SIZES = 3, 7
_MAX_REPEATS = 15
_COPY_BYTES = 4 * 1024 * 1024


class NoRoomError(RuntimeError):
    """A rank has no shared memory left for a message; raised on all ranks."""


class _Channel:
    """The collectives of a transport that calibration needs, each complete when it returns."""

    def __init__(self, transport: _C.Transport, device: torch.device, timeout: datetime.timedelta) -> None:
        self._transport, self._device, self._timeout = transport, device, timeout
        self._work = transport.make_work()
        largest = _LAST_BYTES if transport.reaches_any_memory else _LAST_SHARED_BYTES
        self.memory = transport.allocate(largest // 4, torch.empty(0, device=device)).zero_()
        if _C.agree_on_memory(transport, timeout) is not transport:
            raise NoRoomError(f"there is no room for a message of {largest} bytes in the memory that ranks share")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._transport.all_reduce(tensor, self._work)
        self._work.wait(self._timeout)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def of_rank_0(self, *values: float) -> list[float]:
        return TransportExchange(self._transport, float, self._device, self._timeout).of_rank_0(values)


def measure_cost(
    transport: _C.Transport,
    device: torch.device,
    timeout: datetime.timedelta = datetime.timedelta(0),
    *,
    host_too: bool = False,
) -> LinearCost:
    """Collective: time all-reduces of growing size and fit a line. Equal on all ranks: rank 0's clocks.

    ``timeout``: zero for the transport's own. Allocates up to 16 MiB of the transport's memory meanwhile (1 MiB of
    shared memory). Takes about 0.6 s, longer only where a message of 64 KiB takes longer than a tenth of that.
    ``host_too``: what TCP takes of the CPU as well, which only the simulator asks for (0.2 s more).

    Raises:
        TransportError: a peer is gone. NoRoomError: see there.
    """
    if transport.size == 1:
        return LinearCost(0.0, 0.0)
    channel = _Channel(transport, device, timeout)
    wall: list[tuple[float, float]] = []
    start_s = time.monotonic()
    nbytes = _FIRST_BYTES
    while True:
        wall_s = _time_message(channel, nbytes)
        wall.append((float(nbytes), wall_s))
        nbytes *= _GROWTH
        # Warm-up, the call that is timed first, and at least one more.
        next_s = 3 * _GROWTH * wall_s
        late = len(wall) >= _LEAST_SIZES and time.monotonic() - start_s + next_s > _BUDGET_S
        if channel.of_rank_0(float(late or nbytes > channel.memory.nbytes))[0]:
            break
    alpha_s, beta_s = fit_line(wall)
    # Rank 0 alone, so that nobody takes the core meanwhile.
    asks_host = host_too and transport.rank == 0 and device.type == "cpu"
    host_alpha_s, host_beta_s = measure_host_cost() if asks_host else (0.0, 0.0)
    return LinearCost(
        *channel.of_rank_0(
            alpha_s, beta_s, host_beta_s, host_alpha_s, _measure_copy(device), misfit(wall, alpha_s, beta_s)
        )
    )


def _time_message(channel: _Channel, nbytes: int) -> float:
    message = channel.memory[: nbytes // 4]
    channel.all_reduce(message)
    send = partial(channel.all_reduce, message)
    affordable = _BUDGET_S / _MAX_SIZES / max(seconds_of(send), 1e-9)
    repeats = int(channel.of_rank_0(min(_MAX_REPEATS, max(1, affordable)))[0])
    return statistics.median(seconds_of(send) for _ in range(repeats))


def seconds_of(call: Callable[[], object], device: torch.device | None = None) -> float:
    """With ``device``: until it has done all of it."""
    before_s = time.perf_counter()
    call()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - before_s


def _measure_copy(device: torch.device) -> float:
    """Seconds per byte to pack a gradient; 0 on a device, where packing is not on the way of the computation."""
    if device.type != "cpu":
        return 0.0
    copy = partial(torch.zeros(_COPY_BYTES // 4).copy_, torch.zeros(_COPY_BYTES // 4))
    return statistics.median(seconds_of(copy) for _ in range(_MAX_REPEATS)) / _COPY_BYTES


# --- a line through measured times (pure) ---


def fit_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(alpha, beta) of ``seconds = alpha + beta * nbytes``, neither below zero.

    ``samples``: (nbytes, seconds > 0). Relative errors count, so that a message of a kilobyte says as much about alpha
    as one of a megabyte about beta.

    Raises:
        ValueError: no samples, or a time that is not positive.
    """
    if not samples or any(seconds <= 0 for _, seconds in samples):
        raise ValueError(f"fitting a line needs positive times, got {list(samples)}")
    # Least squares of (alpha + beta * n - t) / t: minimise sum((alpha * u + beta * v - 1)^2), u = 1 / t, v = n / t.
    u = [1 / seconds for _, seconds in samples]
    v = [nbytes / seconds for nbytes, seconds in samples]
    uu, uv, vv = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        alpha = (sum(u) * vv - sum(v) * uv) / determinant
        beta = (sum(v) * uu - sum(u) * uv) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # On the edge of what is allowed one of them is zero: the one that leaves the smaller error.
    edges = [(sum(u) / uu, 0.0)]
    if vv > 0:
        edges.append((0.0, sum(v) / vv))
    return min(edges, key=lambda edge: sum((edge[0] * a + edge[1] * b - 1) ** 2 for a, b in zip(u, v, strict=True)))


def misfit(samples: Sequence[tuple[float, float]], alpha: float, beta: float) -> float:
    return statistics.median(abs(alpha + beta * nbytes - seconds) / seconds for nbytes, seconds in samples)


# --- what the CPU has to do for a message that TCP carries, however fast the link is ---

_SMALL_BYTES, _SMALL_ROUNDS = 16 * 1024, 15
# More than caches hold, as in a training step.
_LARGE_BYTES, _LARGE_ROUNDS = 16 * 1024 * 1024, 7
_HOST_TIMEOUT = datetime.timedelta(seconds=10)


def measure_host_cost() -> tuple[float, float]:
    """CPU seconds of one rank per message and per byte of gloo's all-reduce between two ranks; about 0.2 s, and 32 MiB
    meanwhile.

    Both ranks are this process, connected over its own loopback interface: over a slow link the same CPU wakes up for
    every packet, so what it needs there says nothing of a faster one. Not collective. (0, 0) without gloo,
    or where the two don't connect.
    """
    if not dist.is_gloo_available():
        return 0.0, 0.0
    store = dist.HashStore()
    groups: list[Any]  # of class ProcessGroupGloo, whose collectives torch's stubs don't know
    try:
        with ThreadPoolExecutor(2) as pool:  # each waits for the other to connect
            groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, _HOST_TIMEOUT), range(2)))
    except RuntimeError:
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
