"""Calls that may never return, made where they hold nobody up."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torchddp.transport.own_process import OwnProcess

__all__ = ["BoundedCalls"]


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        self.done.set()


class BoundedCalls:
    """Makes calls one after the other on a thread of its own, there from the first call on; thread-safe.

    A client of torch's TCPStore waits without a limit for a server whose process is stopped, whatever timeout it has.
    In a forked child every call raises RuntimeError: the thread is the parent's, and so is what it talks over.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._home = OwnProcess()
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: _Call | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """What ``function()`` gives or raises; RuntimeError if it takes too long, or an earlier one still does."""
        if not self._home.is_here:
            raise RuntimeError("this is the forked child of the process that makes these calls")
        with self._lock:
            if self._late is not None and not self._late.done.is_set():
                raise RuntimeError(f"a call has not returned after {self._limit_s:g} s")
            self._late = None
            if self._thread is None:
                self._start()
            call = _Call(function)
            self._calls.put(call)
            if not call.done.wait(self._limit_s):
                self._late = call
                raise RuntimeError(f"no answer within {self._limit_s:g} s")
        if call.error is not None:
            raise call.error
        return call.result

    def _start(self) -> None:
        # A daemon: it may be stuck when the process ends.
        self._thread = threading.Thread(target=_run, args=(self._calls,), name="torchddp-store", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)


def _run(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # which may hold the store
