"""Everything that runs alongside training, mostly on threads: compression hooks, store calls, periodic checks.

Note [One thread per hook]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A compressor sends several messages per bucket, and each depends on the result of the one before. If they were chained
on futures, the second messages of two buckets would be sent in whatever order gloo's threads finish the first ones,
which differs between ranks, and collectives would be mismatched. So each hook has one thread, which handles one bucket
after another over process groups of its own, while backward continues.

On a device, the caller's thread queues all of a bucket's work on a stream of the hook's, and waits only where a method
looks at values (PowerSGD, once for each shape). A thread would call NCCL in any order with what the model's own
communicator sends, and NCCL wants the calls on all communicators of a device in the same order on all ranks.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchddp import _C

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_END_S = 2.0  # how long the interpreter waits at exit for running calls
_GLOO = b"pt_gloo_runloop"  # the name of its threads
_MOMENT_S = 0.001


class _Jobs:
    """A thread that runs jobs in order until `end` is called or its owner is destroyed.

    A forked child has none of its parent's threads, and locks in an arbitrary state. Objects with a thread or a lock
    therefore do nothing in a process other than their own, and check that before they take the lock.
    """

    def __init__(self, owner: object, name: str) -> None:
        self._pid = os.getpid()
        self.queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A daemon, because it may be stuck when the process ends.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.end = weakref.finalize(owner, self.queue.put, None)
        self.end.atexit = False  # `_end_threads` does it
        _jobs.add(self)

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def _run(self) -> None:
        while (job := self.queue.get()) is not None:
            job()
            del job  # keep no model or store alive while waiting

    def join(self, limit_s: float) -> bool:
        """Called after `end`: whether the thread ended in time."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()


# A thread keeps its `_Jobs` in this set until it ends, also if the owner has gone before it.
_jobs: weakref.WeakSet[_Jobs] = weakref.WeakSet()


class Worker:
    """Runs jobs in order: on one thread, which starts with the first job and ends with this object; those for a device
    on the caller's thread, on a stream. See Note [One thread per hook].

    After a failed job, all later ones fail at once with its cause: the ranks no longer agree on what to send.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: _Jobs | None = None
        self._order = _Order()

    def submit(self, job: Callable[[], Tensor], label: str, device: torch.device) -> torch.futures.Future[Tensor]:
        """Return a future with the tensor that ``job()`` returns, or with its error, prefixed by ``label``."""
        if device.type != "cpu":
            return self._order.run_on_stream(job, label, device).then(_value_of)
        if self._jobs is None or not self._jobs.is_here:
            self._jobs, self._order = _Jobs(self, self._name), _Order()
        future: torch.futures.Future[Tensor | _Failure] = torch.futures.Future()
        self._jobs.queue.put(functools.partial(self._order.run, job, label, future))
        return future.then(_value_of)

    @property
    def error(self) -> BaseException | None:
        """What the first failed job raised; its future has no more than the text."""
        return None if self._order.failure is None else self._order.failure.error

    def close(self) -> None:
        """End the thread once its jobs are done. A later submit() starts a new one."""
        if self._jobs is not None and self._jobs.is_here:
            self._jobs.end()
        self._jobs, self._order = None, _Order()

    def finish(self, limit_s: float) -> bool:
        """Like `close`, but waits for the end; returns whether it came in time."""
        jobs = self._jobs
        self.close()
        return jobs is None or not jobs.is_here or jobs.join(limit_s)


class _Failure:
    """The result of a failed job. (An exception set on a torch future is lost on its way to C++.)"""

    def __init__(self, label: str, error: BaseException, first: _Failure | None = None) -> None:
        cause = f"{type(error).__name__}: {error}" if first is None else f"not reduced after {first.message}"
        self.message: str = f"{label}: {cause}"
        self.error = error.with_traceback(None)  # its frames hold the model


def _value_of(future: torch.futures.Future[Tensor | _Failure]) -> Tensor:
    value = future.value()
    if isinstance(value, _Failure):
        raise RuntimeError(value.message) from value.error
    return value


class _Order:
    def __init__(self) -> None:
        self.failure: _Failure | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    @torch.no_grad()
    def run(self, job: Callable[[], Tensor], label: str, future: torch.futures.Future[Tensor | _Failure]) -> None:
        result: Tensor | _Failure
        if self.failure is not None:
            result = _Failure(label, self.failure.error, self.failure)
        else:
            try:
                result = job()
            except BaseException as error:
                result = self.failure = _Failure(label, error)
        future.set_result(result)

    def run_on_stream(
        self, job: Callable[[], Tensor], label: str, device: torch.device
    ) -> torch.futures.Future[Tensor | _Failure]:
        """Return the completed future, whose waiters wait for what the job has queued."""
        future: torch.futures.Future[Tensor | _Failure] = torch.futures.Future(devices=[device])
        ready = torch.accelerator.current_stream(device).record_event()
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        # The program's autocast is none of the job's.
        with self._streams[device] as stream, torch.autocast(device.type, enabled=False):
            stream.wait_event(ready)
            self.run(job, label, future)
        if self.failure is not None and not isinstance(self.failure.error, Exception):
            raise self.failure.error  # Ctrl-C
        return future


class BoundedCalls:
    """Makes calls that may never return, without blocking: in order, on a thread that ends with this object.
    Thread-safe.

    A client of torch's TCPStore waits forever for a server whose process is stopped, whatever its timeout. In a forked
    child every call raises RuntimeError.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._jobs = _Jobs(self, "torchddp-store")
        self._ended = ""
        self._late: concurrent.futures.Future[Any] | None = None

    def call(self, function: Callable[[], Result], patience_s: float = 0.0) -> Result:
        """Return or raise what ``function()`` does; RuntimeError if it, or an earlier call, takes too long.

        ``patience_s``: a longer limit, for both, for a caller that can't do without an answer.
        """
        limit_s = max(self._limit_s, patience_s)
        answer = self.start(function, behind_late=patience_s > 0)
        concurrent.futures.wait([answer], limit_s)
        if not answer.done():
            self._late = answer
            raise RuntimeError(f"no answer within {limit_s:g} s")
        return answer.result()

    def start(self, function: Callable[[], Result], *, behind_late: bool = False) -> concurrent.futures.Future[Result]:
        """Without waiting. RuntimeError if an earlier call takes too long, unless this one may wait behind it."""
        if not self._jobs.is_here:
            raise RuntimeError("this is the forked child of the process that makes these calls")
        answer: concurrent.futures.Future[Result] = concurrent.futures.Future()
        with self._lock:
            if self._late is not None and self._late.done():
                self._late = None
            if self._late is not None and not behind_late:
                raise RuntimeError(f"a call has not returned after {self._limit_s:g} s")
            if self._ended:
                raise RuntimeError(self._ended)
            self._jobs.queue.put(functools.partial(_answer, answer, function))
        return answer

    def end(self, why: str) -> None:
        """End the thread after the calls made so far; later ones raise RuntimeError(why)."""
        with self._lock:
            self._ended = why
            self._jobs.end()


def _answer(answer: concurrent.futures.Future[Result], function: Callable[[], Result]) -> None:
    try:
        answer.set_result(function())
    except Exception as error:
        answer.set_exception(error)


class Task:
    """A periodic check, until `close`; an error is logged and ends it."""

    def __init__(self, look: Callable[[], None], every_s: float) -> None:
        self.look = look
        self.every_s = every_s
        self.due_s = time.monotonic() + every_s
        self.closed = False

    def close(self) -> None:
        """Stop the checks; one that is running continues. Thread-safe."""
        self.closed = True

    def run(self) -> None:
        try:
            self.look()
        except Exception:
            if not self.closed:
                logger.exception("The watcher of rank processes (pid %d) gives up one of its tasks", os.getpid())
            self.closed = True
        self.due_s = time.monotonic() + self.every_s


class _Watcher:
    """The shared thread, alive while there are tasks. A forked child starts with none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._tasks: list[Task] = []
        self._thread: threading.Thread | None = None
        self._ends = False

    def add(self, task: Task) -> None:
        with self._changed:
            if self._ends:
                return
            self._tasks.append(task)
            if self._thread is None or not self._thread.is_alive():
                # A daemon, because no check may keep a process from ending.
                thread = threading.Thread(target=self._run, name="torchddp-watcher", daemon=True)
                thread.start()  # raises at the process limit
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._tasks = [task for task in self._tasks if not task.closed]
                if self._ends or not self._tasks:
                    self._thread = None
                    return
                task = min(self._tasks, key=lambda task: task.due_s)
                wait_s = task.due_s - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
            task.run()

    def end(self, limit_s: float) -> bool:
        """Whether the thread ended in time."""
        with self._changed:
            self._ends = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(limit_s)
        return thread is None or not thread.is_alive()


_watcher = _Watcher()


@atexit.register
def _end_threads() -> None:
    """Before the interpreter ends: a thread that returns from C++ after that aborts the process, unless it is kept."""
    until_s = time.monotonic() + _END_S
    ended = _watcher.end(_END_S)  # it makes calls on the others
    here = [jobs for jobs in _jobs if jobs.is_here]
    for jobs in here:
        jobs.end()
    for jobs in here:
        ended &= jobs.join(max(0.0, until_s - time.monotonic()))
    if not ended:
        _C.keep_threads_at_exit()
    while _is_gloo_busy() and time.monotonic() < until_s:
        pass


def _is_gloo_busy() -> bool:
    """Whether one of gloo's threads runs. It drops an operation some time after its end, and needs the interpreter's
    lock if a tensor has an object in Python."""
    time.sleep(_MOMENT_S)  # without the lock, for which one may wait
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, state = thread.read_bytes().partition(b"(")[2].rsplit(b")", 1)
            if name == _GLOO and not state.startswith(b" S"):
                return True
    return False


def _after_fork() -> None:
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_after_fork)


def watch(look: Callable[[], None], every_s: float) -> Task:
    """Call ``look()`` every ``every_s`` seconds on a thread of this process, which all checks share, until closed."""
    task = Task(look, every_s)
    _watcher.add(task)
    return task
