"""One thread that reduces buckets, in the order in which they became ready.

Note [One thread per hook]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A compressor sends several messages for a bucket, and what it sends next depends on what it got. Chained on futures, the
second messages of two buckets would be sent in whatever order gloo's threads finish the first, which differs between
ranks: collectives would be matched with others. So each hook has one thread, which takes bucket after bucket, over
process groups that nobody else uses. Backward goes on meanwhile.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchddp.transport.own_process import OwnProcess

__all__ = ["Worker"]

_Future = torch.futures.Future


class Worker:
    """Runs jobs in order on a thread of its own, which starts with the first one and ends with this object.

    After a job that failed all later ones fail at once with the same cause: the ranks no longer agree on what to send.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._home: OwnProcess | None = None  # of the thread
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end: Any = None

    def submit(self, job: Callable[[], Tensor], label: str, device: torch.device) -> torch.futures.Future[Tensor]:
        """A future with the tensor that ``job()`` returns, or with its error, which begins with ``label``."""
        if not self._is_here():
            self._start()
        on_cuda = device.type == "cuda"
        future: Any = _Future(devices=[device]) if on_cuda else _Future()
        ready = None
        if on_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        self._queue.put((job, label, future, device, ready))
        return future.then(_value_of)

    def _start(self) -> None:
        self._queue = queue.SimpleQueue()
        self._home = OwnProcess()
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False  # daemon threads end with the process

    def close(self) -> None:
        """Ends the thread once its jobs are done. A later submit() starts a new one."""
        if self._end is not None and self._is_here():
            self._end()
        self._home = None

    def finish(self, limit_s: float) -> bool:
        """As `close`, and waits for the end: whether it came in time."""
        is_here = self._is_here()
        self.close()
        if is_here and self._thread is not None:
            self._thread.join(limit_s)
            return not self._thread.is_alive()
        return True

    def _is_here(self) -> bool:
        """Whether there is a thread: it was started, and in this process."""
        return self._home is not None and self._home.is_here


class _Failure:
    """What a job's future holds if it failed. (An error that is set on a future of torch is lost on the way to C++.)"""

    def __init__(self, label: str, error: BaseException, first: _Failure | None = None) -> None:
        cause = f"{type(error).__name__}: {error}" if first is None else f"not reduced, for before it {first.message}"
        self.message: str = f"{label}: {cause}"
        self.error = error.with_traceback(None)  # whose frames hold the model


def _value_of(future: Any) -> Tensor:
    value = future.value()
    if isinstance(value, _Failure):
        raise RuntimeError(value.message) from value.error
    return value


def _work(jobs: queue.SimpleQueue[Any]) -> None:
    failure: _Failure | None = None
    streams: dict[torch.device, torch.cuda.Stream] = {}
    with torch.no_grad():
        while (task := jobs.get()) is not None:
            job, label, future, device, ready = task
            result: Any
            if failure is not None:
                result = _Failure(label, failure.error, failure)
            else:
                try:
                    result = job() if ready is None else _run_on_stream(job, device, ready, streams)
                except BaseException as error:
                    result = failure = _Failure(label, error)
            future.set_result(result)
            del task, job, future, result  # while it waits, nothing of the model is held


def _run_on_stream(
    job: Callable[[], Tensor],
    device: torch.device,
    ready: torch.cuda.Event,
    streams: dict[torch.device, torch.cuda.Stream],
) -> Tensor:
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    torch.cuda.set_stream(streams[device])  # this thread's alone; the future remembers it for who waits
    streams[device].wait_event(ready)
    return job()
