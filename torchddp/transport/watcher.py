"""One thread of a process that looks at things now and then."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable

__all__ = ["Task", "watch"]

logger = logging.getLogger(__name__)

_END_S = 2.0  # how long the interpreter waits at its exit for a look that is under way


class Task:
    """Something that is looked at every so often, until `close`; errors are logged, and end it."""

    def __init__(self, look: Callable[[], None], every_s: float) -> None:
        self.look = look
        self.every_s = every_s
        self.due_s = time.monotonic() + every_s
        self.closed = False

    def close(self) -> None:
        """It is not looked at any more, though a look that is under way goes on. From any thread."""
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
    """The thread: there while there are tasks. A forked child starts with none."""

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
                # A daemon: nothing that is watched may keep a process from ending.
                self._thread = threading.Thread(target=self._run, name="torchddp-watcher", daemon=True)
                self._thread.start()
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

    def end(self) -> None:
        """Before the interpreter ends: a thread that comes back from C++ after that ends the process with SIGABRT."""
        with self._changed:
            self._ends = True
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(_END_S)


_watcher = _Watcher()
atexit.register(lambda: _watcher.end())


def _after_fork() -> None:
    global _watcher
    _watcher = _Watcher()


os.register_at_fork(after_in_child=_after_fork)


def watch(look: Callable[[], None], every_s: float) -> Task:
    """Calls ``look()`` every ``every_s`` seconds from a thread of this process, until the result is closed.

    Looks share the thread: they must not wait, and a long one delays the others.
    """
    task = Task(look, every_s)
    _watcher.add(task)
    return task
