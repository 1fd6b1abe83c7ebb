"""The cost of an all-reduce over a transport, as a line: a fixed time per message plus a time per byte."""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from torchddp import _C
from torchddp.transport.agreement import TransportExchange

_SIZES = 4096, 16 * 1024 * 1024, 4  # the smallest and largest in bytes, and the growth
# Smaller messages take a different path through shared memory than buckets do, and larger ones cost the same per byte.
# There are few sizes, so that the largest is always timed: with many ranks, only it shows the cost of a byte.
_SHARED_SIZES = 16 * 1024, 1024 * 1024, 8
_LEAST_SIZES, _MAX_SIZES = 3, 7
_MAX_REPEATS = 100


class NoRoomError(RuntimeError):
    """A rank has no shared memory left for a message; raised on all ranks."""


class MessageLine(NamedTuple):
    """An all-reduce of n bytes takes ``alpha_s + n * beta_s_per_byte``, neither below zero."""

    alpha_s: float
    beta_s_per_byte: float
    misfit: float = 0.0  # median relative distance between the measurements and the line


def measure_line(
    transport: _C.Transport, device: torch.device, timeout: datetime.timedelta, budget_s: float
) -> MessageLine:
    """Collective: time all-reduces of growing size and fit a line. Equal on all ranks (rank 0's clock).

    Temporarily allocates up to 16 MiB of the transport's memory (1 MiB of shared memory). ``timeout``: zero for the
    transport's own. ``budget_s``: the maximum number of seconds, unless three sizes take longer.

    TransportError: a peer died or did not arrive in time. NoRoomError: a rank has no memory for a message.
    """
    if transport.size == 1:
        return MessageLine(0.0, 0.0)
    nbytes, largest, growth = _SIZES if transport.reaches_any_memory else _SHARED_SIZES
    memory = transport.allocate(largest // 4, torch.empty(0, device=device)).zero_()
    if _C.agree_on_memory(transport, timeout) is not transport:
        raise NoRoomError(f"there is no room for a message of {largest} bytes in the memory that ranks share")
    exchange = TransportExchange(transport, float, device, timeout)
    work = transport.make_work()
    times: list[tuple[float, float]] = []
    start_s = time.monotonic()
    while True:
        send = partial(_all_reduce, transport, memory[: nbytes // 4], work, timeout)
        seconds = _time_message(partial(seconds_of, send, device), exchange, budget_s / _MAX_SIZES)
        times.append((float(nbytes), seconds))
        nbytes *= growth
        # A warm-up, the call that is timed first, and at least one more.
        next_s = 3 * growth * seconds
        late = len(times) >= _LEAST_SIZES and time.monotonic() - start_s + next_s > budget_s
        if exchange.of_rank_0([late or nbytes > memory.nbytes])[0]:
            break
    line = fit_line(times)
    return MessageLine(*exchange.of_rank_0([*line, misfit(times, *line)]))


def _all_reduce(transport: _C.Transport, message: torch.Tensor, work: _C.Work, timeout: datetime.timedelta) -> None:
    transport.all_reduce(message, work)
    work.wait(timeout)


def _time_message(timed: Callable[[], float], exchange: TransportExchange, budget_s: float) -> float:
    """``timed``: sends the message once, and returns the seconds it took."""
    timed()
    affordable = budget_s / max(timed(), 1e-9)
    repeats = int(exchange.of_rank_0([min(_MAX_REPEATS, max(1, affordable))])[0])
    # The lower quartile: on a busy machine some calls wait for a core, which says nothing about the message.
    return sorted(timed() for _ in range(repeats))[repeats // 4]


def seconds_of(call: Callable[[], object], device: torch.device | None = None) -> float:
    """The duration of a call; with ``device``, until the device has finished."""
    before_s = time.perf_counter()
    call()
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - before_s


# --- a line through measured times (pure) ---


def fit_line(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (alpha, beta) of ``seconds = alpha + beta * nbytes``, neither below zero.

    ``samples``: (nbytes, seconds > 0). Minimizes relative errors, so that small messages determine alpha as well as
    large ones determine beta. ValueError: no samples, or a time that is not positive.
    """
    if not samples or any(seconds <= 0 for _, seconds in samples):
        raise ValueError(f"fitting a line needs positive times, got {list(samples)}")
    # Least squares of (alpha + beta * n - t) / t: minimize sum((alpha * u + beta * v - 1)^2), u = 1 / t, v = n / t.
    u = [1 / seconds for _, seconds in samples]
    v = [nbytes / seconds for nbytes, seconds in samples]
    uu, uv, vv = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        alpha = (sum(u) * vv - sum(v) * uv) / determinant
        beta = (sum(v) * uu - sum(u) * uv) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # At the boundary one of them is zero; choose the solution with the smaller error.
    edges = [(sum(u) / uu, 0.0)]
    if vv > 0:
        edges.append((0.0, sum(v) / vv))
    return min(edges, key=lambda edge: sum((edge[0] * a + edge[1] * b - 1) ** 2 for a, b in zip(u, v, strict=True)))


def misfit(samples: Sequence[tuple[float, float]], alpha: float, beta: float) -> float:
    return statistics.median(abs(alpha + beta * nbytes - seconds) / seconds for nbytes, seconds in samples)
