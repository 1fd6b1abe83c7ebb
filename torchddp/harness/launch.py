"""Starts ranks, runs a function on each, and leaves no process behind."""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from torchddp.harness.variants import ArgumentError, describe_error

# A launch that sends nothing for this long counts as dead. The largest model on a busy machine warms up far faster.
STALL_TIMEOUT_S = 180.0
# How long to wait after the first error for those of the other ranks.
ERROR_GRACE_S = 1.0
# Often enough for a progress bar, rarely enough not to disturb a measurement.
PROGRESS_INTERVAL_S = 0.5

EXIT_BAD_ARGUMENT = 2
EXIT_INTERRUPTED = 130  # by Ctrl-C

# Of each rank. One thread, also for libraries that read the variable when they are loaded; torch's class is torch's.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHDDP_INSTALL": "0"}

# Called with the current activity, the amount done, and the total.
Progress = Callable[[str, float, float], None]
# Called on a rank with the amount done and the total.
Report = Callable[[float, float], None]


class LaunchError(RuntimeError):
    """Ranks failed; the message says which and why. `partial`: what rank 0 had kept by then (`Reporter.keep`)."""

    def __init__(self, message: str, partial: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.partial = tuple(partial)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    model: str
    world_size: int
    transport: str
    find_unused_parameters: bool


@dataclass(frozen=True)
class Place:
    """Where the ranks of a launch run: here as ordinary processes on this machine. Picklable."""

    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = 1.0  # how many times longer than on this host ranks may wait

    def init_method(self, folder: str) -> str:
        """Of the process group; the folder is on this host."""
        return f"file://{folder}/store"

    def enter(self, rank: int) -> None:
        """The first call of each rank."""


THIS_HOST = Place()


@dataclass(frozen=True)
class RankJob:
    """One call of `function(report, *arguments)`, which is module-level, on every rank; rank 0's result is kept."""

    case: str  # for messages
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    world_size: int
    backend: str = "gloo"
    # A rank that waits longer than this for another rank raises an error.
    collective_timeout_s: float = 60.0
    # Of each rank that the command starts; torchrun's ranks keep their own number.
    threads: int = 1


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ[key] for key in extra if key in os.environ}
    os.environ.update(extra)
    try:
        yield
    finally:
        for key in extra:
            del os.environ[key]
        os.environ.update(before)


@contextlib.contextmanager
def _children_ignore_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C: this process handles it and stops them."""
    resource_tracker.ensure_running()  # otherwise the first process would start it, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """The first Ctrl-C raises KeyboardInterrupt, the first SIGTERM SystemExit; later ones must not disturb the cleanup.

    SIGTERM ends torchrun's ranks as usual: they may be in a wait that no exception ends.
    """
    numbers = [signal.SIGINT] if started_by_torchrun() else [signal.SIGINT, signal.SIGTERM]
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if in_main_thread}
    handled = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]

    def interrupt(number: int, frame: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


class Inbox:
    """``exit_code``: of a rank whose channel is closed; None if it is not known."""

    def __init__(
        self, channels: list[Connection], progress: Progress, exit_code: Callable[[int], int | None] = lambda rank: None
    ) -> None:
        self._exit_code = exit_code
        self._rank_of = {id(channel): rank for rank, channel in enumerate(channels)}
        self.open = list(channels)
        self.results: dict[int, Any] = {}
        self.errors: dict[int, str] = {}
        # Why a rank rejected what the user asked for, in one sentence.
        self.refusal = ""
        self.partial: list[Any] = []
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
                    code = self._exit_code(rank) or 0
                    kinds = {0: "ended without a message", -signal.SIGKILL: "was killed (SIGKILL): out of memory?"}
                    ended = f"ended with exit code {code}; see its output" if code > 0 else f"crashed (signal {-code})"
                    self.errors[rank] = f"the process {kinds.get(code, ended)}"
                continue
            if kind == "progress":
                self._progress(*payload)
            elif kind == "partial":
                self.partial.append(payload)
            elif kind == "refusal":
                self.refusal = payload
            else:
                (self.results if kind == "result" else self.errors)[rank] = payload
        return bool(ready)


def follow(inbox: Inbox, job: RankJob, stall_timeout_s: float) -> Any:
    """Wait until every rank is done and return rank 0's result. `LaunchError` with what the ranks reported."""
    while inbox.open and not inbox.errors and not inbox.refusal:
        if not inbox.read(stall_timeout_s):
            silent = [rank for rank in range(job.world_size) if rank not in inbox.results]
            raise LaunchError(
                f"Case '{job.case}' stopped: no message from ranks {silent} for {stall_timeout_s:g} s. The machine may "
                "be overloaded, or a rank may wait for one that hangs: try fewer ranks or a smaller model.",
                inbox.partial,
            )
    if inbox.refusal:
        raise ArgumentError(inbox.refusal)
    if inbox.errors:
        deadline_s = time.monotonic() + ERROR_GRACE_S
        while inbox.open and (left_s := deadline_s - time.monotonic()) > 0:
            inbox.read(left_s)
        raise LaunchError(f"Case '{job.case}' failed: {'; '.join(_by_ranks(inbox.errors))}", inbox.partial)
    return inbox.results[0]


def _by_ranks(errors: Mapping[int, str]) -> Iterator[str]:
    """'rank 0: ...', 'ranks 1, 2: ...': each message once, and those of ranks that only miss another one if all do."""
    texts = dict.fromkeys(text for _, text in sorted(errors.items()))
    causes = [text for text in texts if not text.startswith("TransportError: ")]
    for text in causes or texts:
        ranks = sorted(rank for rank in errors if errors[rank] == text)
        yield f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"


@contextlib.contextmanager
def started(
    world_size: int,
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str] | None = None,
    method: str = "spawn",
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """A process per rank that runs `target(rank, *arguments, channel)`, and our end of its channel. All end with it."""
    mp: Any = multiprocessing.get_context(method)
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        with _children_ignore_interrupts(), _environment({**ENVIRONMENT, **(environment or {})}):
            for rank in range(world_size):
                receiver, sender = mp.Pipe(duplex=False)
                process = mp.Process(target=target, args=(rank, *arguments, sender), daemon=True, name=f"rank{rank}")
                process.start()
                sender.close()
                ranks.append((process, receiver))
        yield ranks
    finally:
        for process, _ in ranks:
            process.kill()
        for process, _ in ranks:
            process.join(timeout=10)


def launch(job: RankJob, progress: Progress, place: Place = THIS_HOST, stall_timeout_s: float = STALL_TIMEOUT_S) -> Any:
    with tempfile.TemporaryDirectory(prefix="torchddp-benchmark-") as folder:
        arguments = (job, place, place.init_method(folder))
        with started(job.world_size, _run_rank, arguments, place.environment) as ranks:

            def exit_code(rank: int) -> int | None:
                process = ranks[rank][0]
                process.join(timeout=1)  # it closes its channel a little earlier
                return process.exitcode

            inbox = Inbox([channel for _, channel in ranks], progress, exit_code)
            result = follow(inbox, job, stall_timeout_s * place.patience)
            for process, _ in ranks:
                process.join(timeout=10)  # it may still have output to write
            return result


# --- on a rank -------------------------------------------------------------------------------------------------------


class Reporter:
    def __init__(self, channel: Connection, what: str, enabled: bool) -> None:
        self._channel, self._what, self._enabled = channel, what, enabled
        self._last_s = 0.0

    def about(self, what: str) -> Reporter:
        """For another activity."""
        return Reporter(self._channel, what, self._enabled)

    def keep(self, value: object) -> None:
        if self._enabled:
            self._channel.send(("partial", value))

    def __call__(self, done: float, total: float) -> None:
        now_s = time.monotonic()
        if self._enabled and now_s - self._last_s >= PROGRESS_INTERVAL_S:
            self._last_s = now_s
            self._channel.send(("progress", (self._what, done, total)))


def _die_with_parent() -> None:
    # Runs in a thread, so that a rank never outlives the command that started it.
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run_rank(rank: int, job: RankJob, place: Place, init_method: str, channel: Connection) -> NoReturn:
    """Join the process group, call the job's function, send the result to the parent, and end the process."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    multiprocessing.current_process().daemon = False  # a daemon can't have children, such as a loader's workers
    os.dup2(2, 1)  # what libraries print must not mix with the command's output
    place.enter(rank)
    exit_code = 1
    try:
        import torch
        import torch.distributed as dist

        warnings.simplefilter("ignore")
        logging.getLogger("torchddp.straggler").setLevel(logging.ERROR)  # the reports name stragglers
        torch.set_num_threads(job.threads)
        dist.init_process_group(
            job.backend,
            init_method=init_method,
            rank=rank,
            world_size=job.world_size,
            timeout=datetime.timedelta(seconds=job.collective_timeout_s * place.patience),
        )
        result = job.function(Reporter(channel, job.case, enabled=rank == 0), *job.arguments)
        # No rank may exit while another one still reads from it.
        dist.barrier()
        channel.send(("result", result if rank == 0 else None))
        exit_code = 0
    except ArgumentError as error:
        channel.send(("refusal", str(error)))
    except BaseException as error:
        channel.send(("error", describe_error(error)))
    channel.close()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the command was started with it closed
        stream.flush()
    # Nothing is left to do, and torch's threads sometimes abort an orderly interpreter exit.
    os._exit(exit_code)


# --- for commands that torchrun may have started ---------------------------------------------------------------------


def started_by_torchrun() -> bool:
    """Whether this process is already a rank: its environment has all that init_process_group needs."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run_ranks(job: RankJob, progress: Progress) -> Any:
    """Run the job and return rank 0's result. Under torchrun, use its ranks; all but rank 0 get None."""
    if not started_by_torchrun():
        return launch(job, progress)
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
        raise LaunchError(f"rank {dist.get_rank()}: {describe_error(error)}") from error
    finally:
        dist.destroy_process_group()
