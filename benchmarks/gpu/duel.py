"""Times alternatives in turn; shared by all rows of kernel and host times."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import trace
from benchmarks.gpu.clock import Clock
from torchddp.bench.timing import enough, no_collections
from torchddp.harness.launch import Report

Work = Callable[[], object]
# Calls per profiler session.
TRACED_CALLS = 10


def host_us(works: Sequence[Work], device: torch.device, seconds: float, seed: int, calls: int) -> np.ndarray:
    """Host time per call, [work, round]: the mean of `calls` in a row, from an idle device."""
    clock, shuffler, order = Clock(device), random.Random(seed), list(range(len(works)))

    def repeated(work: Work) -> None:
        for _ in range(calls):
            work()

    for work in works:
        clock.time(functools.partial(repeated, work))
    rounds: list[list[float]] = []
    with no_collections():
        start_s = time.monotonic()
        while not enough(len(rounds), time.monotonic() - start_s, seconds):
            shuffler.shuffle(order)
            times_us = [0.0] * len(works)
            for index in order:
                _, host_ms = clock.time(functools.partial(repeated, works[index]))
                times_us[index] = host_ms * 1000 / calls
            rounds.append(times_us)
    return np.array(rounds).T


def for_each_size(
    sizes: Sequence[int], report: Report, time_size: Callable[[int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """One table per size."""
    tables = []
    for done, size in enumerate(sizes):
        report(done, len(sizes))
        tables.append(time_size(size))
    return tables


def device_us(work: Work, device: torch.device, counts: Callable[[trace.DeviceEvent], bool]) -> np.ndarray:
    """Device time per call spent on the events that `counts` selects. On a CPU, the time of each whole call."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        clock = Clock(device)
        return np.array([clock.time(work)[0] * 1000 for _ in range(TRACED_CALLS)])
    events = [event for event in trace.record(lambda: [work() for _ in range(TRACED_CALLS)]) if counts(event)]
    return split_by_call([event.end_us - event.start_us for event in events], TRACED_CALLS)


def timed_what(device: torch.device) -> str:
    """The quantity that `device_us` measures, for a title."""
    return "time of the kernels" if device.type == "cuda" else "time of a whole step"


def split_by_call(durations_us: Sequence[float], calls: int) -> np.ndarray:
    """The sum of durations per call. RuntimeError unless each call can have made equally many events."""
    if len(durations_us) % calls:
        raise RuntimeError(f"the profiler saw {len(durations_us)} matching events in {calls} equal calls")
    sums: np.ndarray = np.reshape(durations_us, (calls, -1)).sum(axis=1)
    return sums


def duel(case: str, title: str, times_us: Mapping[str, np.ndarray], **about: Any) -> dict[str, Any]:
    """The input of `results.duel_result`. The first alternative is the baseline."""
    return {"kind": "duel", "case": case, "title": title, "times_us": dict(times_us), **about}
