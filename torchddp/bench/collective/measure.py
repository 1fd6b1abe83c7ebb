"""The work of every rank: open the implementations, check them, time them in turn, check them again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchddp.bench.cases import Job
from torchddp.bench.collective.companion import Run, timed_ns
from torchddp.bench.collective.implementations import OPENINGS, Implementation, Trial, attempt, open_all
from torchddp.bench.collective.operations import (
    ITEM_BYTES,
    OPERATIONS,
    Operation,
    has_roofline,
    streamed_gb_per_s,
    whole_numel,
)
from torchddp.bench.collective.peers import OPENINGS_WITH_PEERS
from torchddp.bench.collective.rounds import open_meeting, timed_rounds
from torchddp.bench.timing import over_ranks
from torchddp.harness.launch import Report

# Untimed calls before each timed one. gloo's threads are still busy two or three small calls later.
SMALL_BYTES = 64 * 1024
LEAD_IN, LEAD_IN_SMALL = 1, 4


class MemoryCopy:
    """A copy within this rank's own memory, which reads and writes as many bytes as a shared-memory all-reduce must."""

    name = "copy"

    def __init__(self, numel: int, meet: Run) -> None:
        self._copy = partial(torch.zeros(numel).copy_, torch.zeros(numel))
        self._meet = meet

    def time_ns(self, lead_in: int) -> int:
        return timed_ns(lambda: None, self._copy, self._meet, lead_in)

    def check(self) -> None:
        """A copy needs no check."""


def _time_size(
    job: Job,
    operation: Operation,
    size_bytes: int,
    implementations: Sequence[Implementation],
    meet: Run,
    report: Report,
) -> dict[str, Any]:
    numel = whole_numel(size_bytes, job.world_size)
    trials: list[Trial] = []
    reasons: dict[str, str] = {}
    for one in implementations:
        trial, reason = attempt(partial(one.trial, operation, numel))
        if trial is None:
            reasons[one.name] = str(reason)
        else:
            trials.append(trial)
    names = [trial.name for trial in trials]
    # Without a core per rank, ranks can't all copy at the same time.
    at_once = job.world_size <= len(os.sched_getaffinity(0))
    if streams := at_once and has_roofline(operation, size_bytes, job.world_size):
        trials.append(MemoryCopy(numel, meet))
    for trial in trials:
        trial.check()
    lead_in = LEAD_IN_SMALL if size_bytes <= SMALL_BYTES else LEAD_IN
    times_us = timed_rounds(trials, job.seconds / len(job.sizes_bytes), job.seed, report, lead_in)
    for trial in trials:
        trial.check()
    copy_us: list[Any] = [None] * job.world_size
    if streams:
        dist.all_gather_object(copy_us, float(np.median(times_us[-1])))
    return {
        "bytes": numel * ITEM_BYTES,
        "unavailable": reasons,
        "names": names,
        "time_us": times_us[: len(names)],
        "slowest_us": over_ranks(times_us, job)[: len(names)],
        "memory_gb_per_s": streamed_gb_per_s(numel * ITEM_BYTES, copy_us) if streams else None,
    }


def time_operation(job: Job, name: str, report: Report) -> dict[str, Any]:
    """Collective: time one operation at all sizes, on rank 0 and on the slowest rank of each round."""
    meet = open_meeting()
    implementations, reasons = open_all(OPENINGS_WITH_PEERS if job.with_peers else OPENINGS, meet)
    count = len(job.sizes_bytes)
    sizes = []
    try:
        for index, size_bytes in enumerate(job.sizes_bytes):

            def report_size(done: float, total: float, index: int = index) -> None:
                report(index + done / total, count)

            sizes.append(_time_size(job, OPERATIONS[name], size_bytes, implementations, meet, report_size))
    finally:
        for one in implementations:
            one.close()
    return {
        "operation": name,
        "peers": job.with_peers,
        "processors": len(os.sched_getaffinity(0)),
        "unavailable": reasons,
        "remarks": {one.name: one.remark for one in implementations if one.remark},
        "sizes": sizes,
    }
