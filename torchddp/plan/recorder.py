"""Measuring steps from inside: ready times of gradients and times of the parts, with no bucket under way meanwhile."""

from __future__ import annotations

import datetime
import statistics
from dataclasses import dataclass

import torch

from torchddp import _C
from torchddp.transport.agreement import TransportExchange


@dataclass(frozen=True)
class StepTimes:
    """Medians over the recorded steps of the slowest rank, in seconds. Equal on all ranks."""

    ready_s: tuple[float, ...]  # by parameter, since backward began
    forward_s: float

    @property
    def backward_s(self) -> float:
        """Computation alone, up to the last gradient."""
        return max(self.ready_s)

    @property
    def order(self) -> tuple[int, ...]:
        """Parameter indices as they became ready."""
        return tuple(sorted(range(len(self.ready_s)), key=lambda index: self.ready_s[index]))


class StepRecorder:
    """Records synchronised steps of one reducer. While it does, buckets wait for the last gradient of the step."""

    def __init__(self, reducer: _C.Reducer) -> None:
        self._reducer = reducer
        self._rows: list[list[float]] = []
        self._finished = reducer.stats()["finished"]
        reducer.record_ready_times(True)
        reducer.set_overlap(False)

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return len(self._rows)

    def collect(self) -> None:
        """Between steps: take down the one that ended, if one did since the last call."""
        stats = self._reducer.stats()
        if stats["finished"] == self._finished:
            return
        self._finished = stats["finished"]
        ready_ns, forward_ns = self._reducer.get_backward_stats(), self._reducer.forward_ns()
        times_ns = [*ready_ns, forward_ns]
        self._rows.append([time_ns / 1e9 for time_ns in times_ns])

    def stop(self) -> None:
        """Buckets are launched as soon as they are full again."""
        self._reducer.set_overlap(True)
        self._reducer.record_ready_times(False)

    def times(self, device: torch.device, timeout: datetime.timedelta = datetime.timedelta(0)) -> StepTimes:
        """Collective: what was recorded on all ranks. ``device``: of the parameters."""
        if not self._rows:
            raise ValueError(
                "no synchronised step was recorded: each needs a forward and a backward outside of no_sync()"
            )
        mine = [statistics.median(column) for column in zip(*self._rows, strict=True)]
        by_rank = TransportExchange(self._reducer.transport, float, device, timeout).gather(mine)
        *ready_s, forward_s = (max(column) for column in zip(*by_rank, strict=True))
        return StepTimes(tuple(ready_s), forward_s)
