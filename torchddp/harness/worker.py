"""What each rank runs. A worker never outlives the command that started it."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from torchddp.bench.cases import RankSettings
from torchddp.harness.variants import ArgumentError

# Often enough for a progress bar, too seldom to disturb a measurement.
PROGRESS_INTERVAL_S = 0.5

# What a rank does once the process group is there; the results, one per model.
Measure = Callable[[Any, int, Connection], Any]


def die_with_parent() -> None:
    """For a thread: a worker never outlives the command that started it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    os._exit(1)


class Reporter:
    """Progress of rank 0, to the parent, throttled."""

    def __init__(self, channel: Connection, what: str, enabled: bool) -> None:
        self._channel, self._what, self._enabled = channel, what, enabled
        self._last_s = 0.0

    def __call__(self, done: float, total: float) -> None:
        """Tell the parent, unless it was told a moment ago."""
        now_s = time.monotonic()
        if self._enabled and now_s - self._last_s >= PROGRESS_INTERVAL_S:
            self._last_s = now_s
            self._channel.send(("progress", (self._what, done, total)))


def _measure(job: Any, rank: int, channel: Connection) -> list[dict[str, Any]]:
    from torchddp.bench.measures import MEASURES, prove_models

    prove_models(job)
    subjects = job.operations or job.models
    return [MEASURES[job.case](job, name, Reporter(channel, name, enabled=rank == 0)) for name in subjects]


def run_rank(rank: int, job: RankSettings, store_path: str, channel: Connection, measure: Measure = _measure) -> None:
    """Entry point of a worker process."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    serve_rank(rank, job, f"file://{store_path}", channel, measure)


def serve_rank(rank: int, job: RankSettings, init_method: str, channel: Connection, measure: Measure) -> NoReturn:
    """Join the process group, measure, say what came of it to the parent, and end the process."""
    exit_code = 1
    try:
        import torch
        import torch.distributed as dist

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group(
            job.backend,
            init_method=init_method,
            rank=rank,
            world_size=job.world_size,
            timeout=datetime.timedelta(seconds=job.collective_timeout_s),
        )
        results = measure(job, rank, channel)
        # No rank may leave while another still reads from it.
        dist.barrier()
        channel.send(("result", results if rank == 0 else None))
        exit_code = 0
    except ArgumentError as error:
        channel.send(("refusal", str(error)))
    except BaseException as error:
        channel.send(("error", f"{type(error).__name__}: {error}"))
    channel.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Past the result nothing is left to do, and torch's threads sometimes abort an orderly interpreter exit.
    os._exit(exit_code)
