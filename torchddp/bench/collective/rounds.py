"""Rounds of timed calls: each round calls every implementation once, in a new order that all ranks share."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch.distributed as dist

from torchddp.bench.cases import MAX_ROUNDS
from torchddp.bench.collective.companion import LINE_BYTES, Meeting
from torchddp.bench.collective.implementations import Trial
from torchddp.bench.timing import agreed, enough, no_collections
from torchddp.harness.launch import Report

WARMUP_ROUNDS = 3
# How often rank 0 checks the clock at each size, approximately. In between, ranks communicate only in timed calls.
BATCHES = 8


@contextmanager
def shared_lines() -> Iterator[str]:
    """Collective: yields a path, the same on every rank, to a file with one cache line of zeros per rank.

    Open it inside the block. The file has no name, so nothing is left behind, however the ranks end.
    """
    path: list[str | None] = [None]
    descriptor = None
    if dist.get_rank() == 0:
        descriptor = os.memfd_create("torchddp-meeting")
        os.ftruncate(descriptor, dist.get_world_size() * LINE_BYTES)
        path[0] = f"/proc/{os.getpid()}/fd/{descriptor}"
    dist.broadcast_object_list(path)
    try:
        yield str(path[0])
        dist.barrier()
    finally:
        if descriptor is not None:
            os.close(descriptor)


def open_meeting() -> Meeting:
    """Collective: create the barrier that precedes each timed call."""
    with shared_lines() as path:
        return Meeting(path, dist.get_rank(), dist.get_world_size())


def next_batch(rounds: int, elapsed_s: float, seconds: float) -> int:
    """The number of rounds until rank 0 decides again; 0 to stop."""
    if enough(rounds, elapsed_s, seconds):
        return 0
    if rounds == 0:
        return 1
    affordable = int(rounds / max(elapsed_s, 1e-9) * seconds / BATCHES)
    return min(max(affordable, 1), MAX_ROUNDS - rounds)


def one_round(trials: Sequence[Trial], order: Sequence[int], lead_in: int) -> list[float]:
    """Time one call of each trial in the given order, after `lead_in` untimed calls to warm the caches.

    Returns:
        Times in us, by trial.
    """
    times_us = [0.0] * len(trials)
    for index in order:
        times_us[index] = trials[index].time_ns(lead_in) / 1e3
    return times_us


def timed_rounds(trials: Sequence[Trial], seconds: float, seed: int, report: Report, lead_in: int) -> np.ndarray:
    """This rank's times in us, [trial, round]. All ranks run the same rounds in the same order."""
    shuffler = random.Random(seed)
    order = list(range(len(trials)))
    for _ in range(WARMUP_ROUNDS):
        one_round(trials, order, lead_in)
    rounds: list[list[float]] = []
    with no_collections():
        start_s = time.monotonic()
        while batch := agreed(next_batch(len(rounds), time.monotonic() - start_s, seconds)):
            for _ in range(batch):
                shuffler.shuffle(order)
                rounds.append(one_round(trials, order, lead_in))
            report(min(time.monotonic() - start_s, seconds), seconds)
    return np.array(rounds).T
