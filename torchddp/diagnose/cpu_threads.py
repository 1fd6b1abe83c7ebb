"""Checks whether the ranks of a host run too many or too few threads for its processors."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchddp import _C
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose.telling import Teller
from torchddp.transport.board import Board

logger = logging.getLogger("torchddp.distributed")

THREADS = "threads of CPU ranks"
VARIABLE = "OMP_NUM_THREADS"
# Reported if there are this many times more threads than processors, or processors than threads.
_TOO_MANY, _TOO_FEW = 1.5, 4
_KEY = "cpu"

_has_looked = False  # once per process: it concerns the job, not the model


@dataclass(frozen=True)
class RankThreads:
    """The CPU resources of a rank.

    Attributes:
        host: equal for ranks of a host.
        threads: of torch's operators.
        processors: those that this rank is bound to.
        machine: those that process 1 is bound to, which are the whole machine's (or container's).
        quota: how many processors control groups allow at a time; 0: unlimited.
        by_variable: whether OMP_NUM_THREADS sets the number of threads; torchrun sets it to 1.
    """

    host: str
    threads: int
    processors: list[int]
    machine: list[int]
    quota: int
    by_variable: bool

    @classmethod
    def of_this_process(cls) -> RankThreads:
        own = _processors_of(0)
        threads = torch.get_num_threads()
        return cls(
            host=_C.host_identity(),
            threads=threads,
            processors=own,
            machine=_processors_of(1) or own,
            quota=_C.processor_quota(),
            by_variable=os.environ.get(VARIABLE) == str(threads),
        )


def _processors_of(pid: int) -> list[int]:
    try:
        return sorted(os.sched_getaffinity(pid))
    except (OSError, AttributeError):  # no permission, or not Linux
        return list(range(os.cpu_count() or 1)) if pid == 0 else []


def advice(ranks: Sequence[RankThreads]) -> str:
    """What is wrong with the threads of the ranks of one host, and what to set; "" if nothing is."""
    count = len(ranks)
    reached = sorted({processor for rank in ranks for processor in rank.processors})
    there = sorted({processor for rank in ranks for processor in rank.machine} | set(reached))
    usable = _within_quota(len(reached), ranks)
    share = max(1, usable // count)
    threads = sum(rank.threads for rank in ranks)
    who = f"The {count} ranks of this host" if count > 1 else "This rank"
    if len(reached) < count and _within_quota(len(there), ranks) > len(reached):
        own = max(1, _within_quota(len(there), ranks) // count)
        return (
            f"{who} are bound to {_processors(reached)} of {len(there)}, and take turns on "
            f"{'it' if len(reached) == 1 else 'them'}. Bind each rank to {own} of its own (taskset, numactl, "
            f"--cpus-per-task={own} with Slurm), or none, and set {VARIABLE}={own}."
        )
    if threads >= _TOO_MANY * usable and max(rank.threads for rank in ranks) > share:
        each = f"{ranks[0].threads} threads each, {threads} in all," if count > 1 else f"{threads} threads"
        return (
            f"{who} {'have' if count > 1 else 'has'} {each} for {usable} processor{'s' if usable > 1 else ''}"
            f"{_of_quota(usable, reached)}, so threads wait for a processor. Set "
            f"{VARIABLE}={share} in the environment of each rank (torchrun sets 1 if it is not set), or call "
            f"torch.set_num_threads({share})."
        )
    if share > 1 and usable >= _TOO_FEW * threads and all(rank.threads == 1 and rank.by_variable for rank in ranks):
        return (
            f"{who} {'have' if count > 1 else 'has'} 1 thread{' each' if count > 1 else ''} for {usable} processors: "
            f"most of them idle. torchrun sets {VARIABLE}=1 if it is not set. Set {VARIABLE}={share} before it starts, "
            f"or call torch.set_num_threads({share}), unless the model's operators are too small to benefit."
        )
    return ""


def _within_quota(processors: int, ranks: Sequence[RankThreads]) -> int:
    """How many of these processors the control groups allow; ranks with different limits have one each."""
    quotas = {rank.quota for rank in ranks}
    quota = quotas.pop() if len(quotas) == 1 else 0
    return max(1, min(processors, quota) if quota else processors)


def _of_quota(usable: int, reached: Sequence[int]) -> str:
    return f" (the control group's limit; {len(reached)} can be seen)" if usable < len(reached) else ""


def _processors(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"processor{'s' if len(numbers) > 1 else ''} {listed}"


class ThreadCheck:
    """For CPU models, in the first step: ranks post their threads and processors, and rank 0 reports on its host."""

    def __init__(self, session: ReducerSession, teller: Teller, board: Board | None) -> None:
        self._session, self._teller, self._board = session, teller, board
        self._own: RankThreads | None = None
        self._finished = 0  # steps, when that was posted

    def after_forward(self) -> bool:
        session = self._session
        try:
            if self._own is None:
                return self._post()
            if session.reducer.finished_steps == self._finished:
                return True  # other ranks may not have reached their first step yet
            self._judge(self._own)
        except RuntimeError as error:
            logger.debug("rank %d can't read the other ranks' numbers of threads: %s", session.rank, error)
        return False

    def close(self) -> None:
        pass

    def _post(self) -> bool:
        global _has_looked
        if _has_looked:
            return False
        _has_looked = True
        self._own = RankThreads.of_this_process()
        self._finished = self._session.reducer.finished_steps
        if self._board is not None:
            self._board.post_own(_KEY, asdict(self._own))
        return self._session.rank == 0

    def _judge(self, own: RankThreads) -> None:
        told: list[Any] = [asdict(own)] if self._board is None else self._board.read_of_ranks(_KEY)
        if any(rank is None for rank in told):
            return
        ranks = [RankThreads(**rank) for rank in told]
        if text := advice([rank for rank in ranks if rank.host == own.host]):
            self._teller.tell(THREADS, text)
