"""Times a piece of work on its device and on the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Clock:
    """Measures two times of one piece of work: until it was done, and until the host was free again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def wait(self) -> None:
        """Waits until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def time(self, work: Callable[[], object]) -> tuple[float, float]:
        """(until done, until the host was free) in ms, from an idle device. On a CPU they are the same."""
        self.wait()
        if self._device.type == "cuda":
            self._begin.record()
        start_ns = time.perf_counter_ns()
        work()
        host_ms = (time.perf_counter_ns() - start_ns) / 1e6
        if self._device.type != "cuda":
            return host_ms, host_ms
        # The current stream has waited for work on other streams, or that work was not part of the step.
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end), host_ms
