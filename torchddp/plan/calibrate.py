"""What one message costs on this group: measured in less than a second, the same answer on all ranks."""

from __future__ import annotations

import datetime
import statistics
import time

import torch

from torchddp import _C
from torchddp.plan.cost_fit import fit_line, misfit
from torchddp.plan.host_cost import measure_host_cost
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
        self._memory = transport.allocate(largest // 4, torch.empty(0, device=device)).zero_()
        if _C.agree_on_memory(transport, timeout) is not transport:
            raise NoRoomError(f"there is no room for a message of {largest} bytes in the memory that ranks share")

    @property
    def largest_bytes(self) -> int:
        """Of a message."""
        return self._memory.nbytes

    def message(self, nbytes: int) -> torch.Tensor:
        return self._memory[: nbytes // 4]

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
        if channel.of_rank_0(float(late or nbytes > channel.largest_bytes))[0]:
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
    """Median seconds of one all-reduce."""
    message = channel.message(nbytes)
    channel.all_reduce(message)
    affordable = _BUDGET_S / _MAX_SIZES / max(_timed(channel, message), 1e-9)
    repeats = int(channel.of_rank_0(min(_MAX_REPEATS, max(1, affordable)))[0])
    return statistics.median(_timed(channel, message) for _ in range(repeats))


def _timed(channel: _Channel, message: torch.Tensor) -> float:
    before_s = time.perf_counter()
    channel.all_reduce(message)
    return time.perf_counter() - before_s


def _measure_copy(device: torch.device) -> float:
    """Seconds per byte to pack a gradient; 0 on a device, where packing is not on the way of the computation."""
    if device.type != "cpu":
        return 0.0
    source, target = torch.zeros(_COPY_BYTES // 4), torch.zeros(_COPY_BYTES // 4)
    times_s = []
    for _ in range(_MAX_REPEATS):
        before_s = time.perf_counter()
        target.copy_(source)
        times_s.append(time.perf_counter() - before_s)
    return statistics.median(times_s) / _COPY_BYTES
