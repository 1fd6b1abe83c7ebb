"""Ways of doing the same thing, timed side by side: what all rows of kernels and host times have in common."""

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
# Calls under one profiler.
TRACED_CALLS = 10


def host_us(works: Sequence[Work], device: torch.device, seconds: float, seed: int, calls: int) -> np.ndarray:
    """[work, round] of the host's time for one call: the mean of `calls` in a row, from an idle device."""
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
    """A table for each size."""
    tables = []
    for done, size in enumerate(sizes):
        report(done, len(sizes))
        tables.append(time_size(size))
    return tables


def device_us(work: Work, device: torch.device, counts: Callable[[trace.DeviceEvent], bool]) -> np.ndarray:
    """[call] of the time for which the device worked at what counts. On the CPU, of each whole call."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        clock = Clock(device)
        return np.array([clock.time(work)[0] * 1000 for _ in range(TRACED_CALLS)])
    events = [event for event in trace.record(lambda: [work() for _ in range(TRACED_CALLS)]) if counts(event)]
    return split_by_call([event.end_us - event.start_us for event in events], TRACED_CALLS)


def timed_what(device: torch.device) -> str:
    """What `device_us` times, for a title."""
    return "time of the kernels" if device.type == "cuda" else "time of a whole step"


def split_by_call(durations_us: Sequence[float], calls: int) -> np.ndarray:
    """[call] of the sums, where each call made equally many events, or none. RuntimeError if it did not."""
    if len(durations_us) % calls:
        raise RuntimeError(f"the profiler saw {len(durations_us)} events that count in {calls} equal calls")
    sums: np.ndarray = np.reshape(durations_us, (calls, -1)).sum(axis=1)
    return sums


def duel(case: str, title: str, times_us: Mapping[str, np.ndarray], **about: Any) -> dict[str, Any]:
    """What `results.duel_result` makes a table of. The first way is the one that the others are held to."""
    return {"kind": "duel", "case": case, "title": title, "times_us": dict(times_us), **about}
