"""Run a function on the ranks of a process group: fresh processes of this machine, or the ranks torchrun started."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torchddp.harness.launch import STALL_TIMEOUT_S, LaunchError, Progress, launch
from torchddp.harness.variants import ArgumentError
from torchddp.harness.worker import Reporter, run_rank

# What a rank does once the process group is there. Only rank 0's result is kept; it must be picklable.
RankFunction = Callable[..., Any]


@dataclass(frozen=True)
class RankJob:
    """One call of `function(report, *arguments)` on every rank. Picklable: a function of a module, by name."""

    case: str
    function: RankFunction
    arguments: tuple[Any, ...]
    world_size: int
    backend: str = "gloo"
    collective_timeout_s: float = 60.0
    # Of each rank that we start; torchrun's have their own count.
    threads: int = 1


def started_by_torchrun() -> bool:
    """Whether this process is a rank already, with all that init_process_group needs in its environment."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run_ranks(job: RankJob, progress: Progress, *, stall_timeout_s: float = STALL_TIMEOUT_S) -> Any:
    """Rank 0's result. Under torchrun the ranks are those it started, and all but rank 0 get None.

    Raises LaunchError if a rank fails, ArgumentError if a rank refused what the user asked for.
    """
    if started_by_torchrun():
        return _join_torchrun(job, progress)
    return launch(job, progress, stall_timeout_s=stall_timeout_s, entry=partial(run_rank, measure=_call))


def _call(job: RankJob, rank: int, channel: Connection) -> Any:
    import torch

    torch.set_num_threads(job.threads)
    return job.function(Reporter(channel, job.case, enabled=rank == 0), *job.arguments)


def _join_torchrun(job: RankJob, progress: Progress) -> Any:
    import torch.distributed as dist

    dist.init_process_group(job.backend, timeout=datetime.timedelta(seconds=job.collective_timeout_s))
    try:
        rank = dist.get_rank()
        result = job.function(
            lambda done, total: progress(job.case, done, total) if rank == 0 else None, *job.arguments
        )
        dist.barrier()
        return result if rank == 0 else None
    except ArgumentError:
        raise
    except Exception as error:
        raise LaunchError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}") from error
    finally:
        dist.destroy_process_group()
