"""Worker side of the case: time the implementations interleaved, size by size."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchddp.bench.cases import MAX_ROUNDS, Job
from torchddp.bench.collective.check import verify
from torchddp.bench.collective.implementations import Implementation, attempt, open_all
from torchddp.bench.collective.operations import (
    ITEM_BYTES,
    OPERATIONS,
    Operation,
    has_roofline,
    streamed_gb_per_s,
    whole_numel,
)
from torchddp.bench.timing import Report, enough

WARMUP_ROUNDS = 3
# Rank 0 looks at the clock about so often in the time of one size; in between ranks meet in nothing but what is timed.
BATCHES = 8
# Calls before the timed one. Small ones are over while threads of gloo still run, in the next two or three too.
SMALL_BYTES = 64 * 1024
LEAD_IN, LEAD_IN_SMALL = 1, 4

Run = Callable[[], object]


def next_batch(rounds: int, elapsed_s: float, seconds: float) -> int:
    """How many more rounds before rank 0 decides again; 0 at the end."""
    if enough(rounds, elapsed_s, seconds):
        return 0
    if rounds == 0:
        return 1
    affordable = int(rounds / max(elapsed_s, 1e-9) * seconds / BATCHES)
    return min(max(affordable, 1), MAX_ROUNDS - rounds)


def _agreed(number: int) -> int:
    """Rank 0's number, on every rank."""
    agreed = torch.tensor([number])
    dist.broadcast(agreed, src=0)
    return int(agreed.item())


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def one_round(runs: Sequence[Run], order: Sequence[int], lead_in: int = LEAD_IN) -> list[float]:
    """One timed call of each in the given order; times in us, by index.

    Each is called `lead_in` times before: the first call takes the ranks out of step with whatever ran before, and
    brings its own memory back into the caches.
    """
    times_us = [0.0] * len(runs)
    for index in order:
        run = runs[index]
        for _ in range(lead_in):
            run()
        start_ns = time.perf_counter_ns()
        run()
        times_us[index] = (time.perf_counter_ns() - start_ns) / 1e3
    return times_us


def timed_rounds(runs: Sequence[Run], seconds: float, seed: int, report: Report, lead_in: int = LEAD_IN) -> np.ndarray:
    """[run, round] of times in us on this rank. Every rank makes the same rounds in the same order."""
    shuffler = random.Random(seed)
    order = list(range(len(runs)))
    for _ in range(WARMUP_ROUNDS):
        one_round(runs, order, lead_in)
    rounds: list[list[float]] = []
    with _no_collections():
        start_s = time.monotonic()
        while batch := _agreed(next_batch(len(rounds), time.monotonic() - start_s, seconds)):
            for _ in range(batch):
                shuffler.shuffle(order)
                rounds.append(one_round(runs, order, lead_in))
            report(min(time.monotonic() - start_s, seconds), seconds)
    return np.array(rounds).T


def _allocate(implementation: Implementation, operation: Operation, numel: int, shard: int) -> tuple[Tensor, Tensor]:
    """The memory an operation reads and the memory it writes, which may be the same."""
    whole = implementation.allocate(numel)
    if not operation.sharded:
        return whole, whole
    part = implementation.allocate(shard)
    return (part, whole) if operation.name == "all_gather" else (whole, part)


def _stream(numel: int) -> Run:
    """A copy within this rank's own memory that moves what an all-reduce in shared memory must: reads B, writes B."""
    source, target = torch.zeros(numel), torch.zeros(numel)
    return partial(target.copy_, source)


def _time_size(
    job: Job, operation: Operation, size_bytes: int, implementations: Sequence[Implementation], report: Report
) -> dict[str, Any]:
    numel = whole_numel(size_bytes, job.world_size)
    checks: list[Run] = []
    runs: list[Run] = []
    names: list[str] = []
    reasons: dict[str, str] = {}
    for one in implementations:
        memory, reason = attempt(partial(_allocate, one, operation, numel, numel // job.world_size))
        if memory is None:
            reasons[one.name] = str(reason)
            continue
        names.append(one.name)
        runs.append(one.bind(operation.name, *memory))
        checks.append(partial(verify, one.name, operation.name, runs[-1], *memory))
    for check in checks:
        check()
    streams = has_roofline(operation, size_bytes, job.world_size)
    if streams:
        runs.append(_stream(numel))
    lead_in = LEAD_IN_SMALL if size_bytes <= SMALL_BYTES else LEAD_IN
    times_us = timed_rounds(runs, job.seconds / len(job.sizes_bytes), job.seed, report, lead_in)
    for check in checks:
        check()
    copy_us: list[Any] = [None] * job.world_size
    if streams:
        dist.all_gather_object(copy_us, float(np.median(times_us[-1])))
    return {
        "bytes": numel * ITEM_BYTES,
        "unavailable": reasons,
        "names": names,
        "time_us": times_us[: len(names)],
        "memory_gb_per_s": streamed_gb_per_s(numel * ITEM_BYTES, copy_us) if streams else None,
    }


def time_operation(job: Job, name: str, report: Report) -> dict[str, Any]:
    """Times of one operation over all sizes, as rank 0's clock shows them."""
    implementations, reasons = open_all()
    count = len(job.sizes_bytes)
    sizes = []
    for index, size_bytes in enumerate(job.sizes_bytes):

        def report_size(done: float, total: float, index: int = index) -> None:
            report(index + done / total, count)

        sizes.append(_time_size(job, OPERATIONS[name], size_bytes, implementations, report_size))
    return {"operation": name, "unavailable": reasons, "sizes": sizes}
