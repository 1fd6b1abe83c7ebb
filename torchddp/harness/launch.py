"""Parent side: start the ranks, follow their messages, and leave no process behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torchddp.bench.cases import RankSettings
from torchddp.harness.variants import ArgumentError
from torchddp.harness.worker import run_rank

# A launch that says nothing for this long is dead. Warm-up of the largest model on a busy machine is far below it.
STALL_TIMEOUT_S = 180.0
# After the first error, so that the other ranks can say what they saw.
ERROR_GRACE_S = 1.0

# One thread each, also for libraries that read the variable when they are loaded.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

Progress = Callable[[str, float, float], None]


class LaunchError(RuntimeError):
    """The ranks did not deliver; the message says which and why."""


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def stop_processes(processes: Sequence[BaseProcess]) -> None:
    """End these processes, however they are."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join(timeout=10)


class Inbox:
    """What the ranks have said so far."""

    def __init__(self, channels: list[Connection], progress: Progress) -> None:
        self._rank_of = {id(channel): rank for rank, channel in enumerate(channels)}
        self.open = list(channels)
        self.results: dict[int, Any] = {}
        self.errors: dict[int, str] = {}
        # What the user asked for cannot be, as a rank found: one sentence.
        self.refusal = ""
        self._progress = progress

    def read(self, timeout_s: float) -> bool:
        """Handle what arrives within the timeout; False if nothing did."""
        ready = wait(self.open, timeout=timeout_s)
        for channel in ready:
            assert isinstance(channel, Connection)
            rank = self._rank_of[id(channel)]
            try:
                kind, payload = channel.recv()
            except (EOFError, ConnectionResetError):
                self.open.remove(channel)
                if rank not in self.results and rank not in self.errors:
                    self.errors[rank] = "the process ended without a word"
                continue
            if kind == "progress":
                self._progress(*payload)
            elif kind == "refusal":
                self.refusal = payload
            else:
                (self.results if kind == "result" else self.errors)[rank] = payload
        return bool(ready)


def follow(inbox: Inbox, job: RankSettings, stall_timeout_s: float) -> Any:
    """Listen until every rank is done; rank 0's results, or a `LaunchError` with what the ranks said."""
    while inbox.open and not inbox.errors and not inbox.refusal:
        if not inbox.read(stall_timeout_s):
            silent = [rank for rank in range(job.world_size) if rank not in inbox.results]
            raise LaunchError(f"Case '{job.case}': nothing from ranks {silent} for {stall_timeout_s:g} s, stopped.")
    if inbox.refusal:
        raise ArgumentError(inbox.refusal)
    if inbox.errors:
        deadline_s = time.monotonic() + ERROR_GRACE_S
        while inbox.open and (left_s := deadline_s - time.monotonic()) > 0:
            inbox.read(left_s)
        said = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(inbox.errors.items()))
        raise LaunchError(f"Case '{job.case}' failed: {said}")
    return inbox.results[0]


def launch(
    job: RankSettings,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    entry: Callable[[int, Any, str, Connection], None] = run_rank,
) -> Any:
    """Run the job on fresh processes, each in `entry`, and return rank 0's result."""
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    receivers: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="torchddp-benchmark-") as folder:
        try:
            with _environment({**ONE_THREAD, **(environment or {})}):
                for rank in range(job.world_size):
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(
                        target=entry, args=(rank, job, f"{folder}/store", sender), daemon=True, name=f"rank{rank}"
                    )
                    process.start()
                    sender.close()
                    processes.append(process)
                    receivers.append(receiver)
            return follow(Inbox(receivers, progress), job, stall_timeout_s)
        finally:
            stop_processes(processes)
