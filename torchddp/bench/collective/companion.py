"""Timed calls of a collective, and the companion process that makes those of an MPI library.

An MPI library needs processes that its own launcher started, and two of them can't be loaded into one process. So each
rank has one companion per library, which sleeps in a read until its rank requests a call. This file also runs as a
program and imports neither torchddp nor torch. Ranks use the same code to time implementations in their own process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np

LINE_BYTES = 64
# Polls between two yields. A yield takes several times as long as a poll, and ranks should leave together.
YIELD_EVERY = 50
# Sent instead of a method and its arguments when the rank no longer needs its companion.
END = ("", ())

Run = Callable[[], object]


class Meeting:
    """A spinning barrier of one host's processes, who leave it within tenths of a microsecond of each other.

    Args:
        path: a file of `size` cache lines, initially zero, that all processes map.
        rank: this process's number, from 0.
        size: the number of processes.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), size * LINE_BYTES)).cast("q")
        words = LINE_BYTES // self._counts.itemsize
        self._mine = rank * words
        self._others = [other * words for other in range(size) if other != rank]

    def __call__(self) -> None:
        counts = self._counts
        counts[self._mine] = count = counts[self._mine] + 1
        for other in self._others:
            polls = 0
            while counts[other] < count:
                polls += 1
                if polls % YIELD_EVERY == 0:
                    os.sched_yield()


def timed_ns(rewrite: Run, run: Run, meet: Run, lead_in: int) -> int:
    """Collective: the time of one call on an input that this process has just written. All ranks start it together.

    `lead_in` untimed calls come first, to bring code and memory back into the caches.
    """
    for _ in range(lead_in):
        rewrite()
        run()
    rewrite()
    meet()
    start_ns = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - start_ns


def first_difference(found: np.ndarray, expected: np.ndarray) -> tuple[int, int, float] | None:
    """The number of wrong elements, the index of the first, and its value; None if all are right."""
    wrong = np.flatnonzero(found != expected)
    return (len(wrong), int(wrong[0]), float(found[wrong[0]])) if len(wrong) else None


class Calls:
    """The requests that a companion serves, one method each. `bind(array)` returns a call that reduces it in place."""

    def __init__(self, bind: Callable[[np.ndarray], Run], meet: Run) -> None:
        self._bind = bind
        self._meet = meet

    def prepare(self, numel: int, stamp: np.ndarray, total: np.ndarray) -> None:
        """Allocate a message of `numel` elements. `stamp` and `total` are the periods of its input and its sum."""
        self._array = np.empty(numel, np.float32)
        self._input = np.resize(stamp, numel)
        self._total = total
        self._run = self._bind(self._array)

    def time_ns(self, lead_in: int) -> int:
        return timed_ns(self._rewrite, self._run, self._meet, lead_in)

    def check(self) -> tuple[int, int, float] | None:
        self._rewrite()
        self._run()
        return first_difference(self._array, np.resize(self._total, self._array.size))

    def _rewrite(self) -> None:
        np.copyto(self._array, self._input)


def serve(channel: Connection, calls: Calls) -> bool:
    """Answer (method, arguments) with (result, None) or (None, error) until END.

    Returns:
        False if the rank ended without sending END.
    """
    while True:
        try:
            method, arguments = channel.recv()
        except (EOFError, ConnectionResetError):
            return False
        if (method, arguments) == END:
            return True
        answer: tuple[Any, str | None]
        try:
            answer = getattr(calls, method)(*arguments), None
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        channel.send(answer)


def _unlink_shared_memory() -> None:
    # A library unlinks its shared memory only when it ends normally. Nothing else here maps any.
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "/dev/shm/" in line}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another companion has unlinked it: "... (deleted)"
            os.unlink(path)


def _die() -> NoReturn:
    _unlink_shared_memory()
    os._exit(1)


def _die_with(pid: int) -> None:
    # Runs in a thread, because the main thread may hang in a call whose other ranks are gone.
    select.select([os.pidfd_open(pid)], [], [])
    _die()


def main(addresses: list[str]) -> None:
    """Serve rank r, which listens at `addresses[r]`, the name of an abstract Unix socket."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    connected = socket.socket(socket.AF_UNIX)
    connected.connect("\0" + addresses[world.rank])
    channel = Connection(connected.detach())
    pid, meeting_path = channel.recv()
    threading.Thread(target=_die_with, args=(pid,), daemon=True).start()
    meet = Meeting(meeting_path, world.rank, world.size)
    channel.send(MPI.Get_library_version().splitlines()[0])

    def bind(array: np.ndarray) -> Run:
        message = [array, MPI.FLOAT]
        return lambda: world.Allreduce(MPI.IN_PLACE, message)

    if not serve(channel, Calls(bind, meet)):
        _die()


if __name__ == "__main__":
    main(sys.argv[1:])
