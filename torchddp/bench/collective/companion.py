"""Timed calls of a collective, and the process beside a rank that makes those of a library of MPI.

Such a library wants processes that its own launcher started, and no two of them fit into one process. So each rank has
a companion per library, which sleeps in a read until its rank asks for a call. Runs as a program, so it imports nothing
of torchddp, and no torch; ranks time the implementations in their own process with the same code.
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
# Looks at a rank that is not there yet: to yield takes several times as long, and ranks should leave together.
YIELD_EVERY = 50
# In place of a method and its arguments: the rank needs its companion no more.
END = ("", ())

Run = Callable[[], object]


class Meeting:
    """Where the processes of one host meet. Collective: each returns within some tenths of a microsecond of the others.

    In memory of `size` cache lines, all zero, that each of them opens by `path`.
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
            looks = 0
            while counts[other] < count:
                looks += 1
                if looks % YIELD_EVERY == 0:
                    os.sched_yield()  # to those that wait for a processor


def timed_ns(rewrite: Run, run: Run, meet: Run, lead_in: int) -> int:
    """The time of one call on an input that this process has just written, begun by all ranks at once.

    `lead_in` calls come before: they bring code and memory back into the caches, after whatever ran in between.
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
    """How many elements are wrong, which is the first, and its value; None if all are right."""
    wrong = np.flatnonzero(found != expected)
    return (len(wrong), int(wrong[0]), float(found[wrong[0]])) if len(wrong) else None


class Calls:
    """What a companion does for its rank, one method per request; `run` all-reduces an array in place."""

    def __init__(self, bind: Callable[[np.ndarray], Run], meet: Run) -> None:
        self._bind = bind
        self._meet = meet

    def prepare(self, numel: int, stamp: np.ndarray, total: np.ndarray) -> None:
        """Memory for a message; of this rank's input and of the sum it gets the period."""
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
    """Answer (method, arguments) with (result, None), or with (None, error), until END.

    False: the rank was gone without it.
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
    # What a library unlinks in its orderly end only, and nobody else has mapped here.
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[-1].strip() for line in file if "/dev/shm/" in line}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another companion was faster, or it is unlinked: "... (deleted)"
            os.unlink(path)


def _die() -> NoReturn:
    _unlink_shared_memory()
    os._exit(1)


def _die_with(pid: int) -> None:
    # In a thread: the main one may hang in a call whose other ranks are gone.
    select.select([os.pidfd_open(pid)], [], [])
    _die()


def main(addresses: list[str]) -> None:
    """Of rank r, at the r-th address of sockets without a file."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    way = socket.socket(socket.AF_UNIX)
    way.connect("\0" + addresses[world.rank])
    channel = Connection(way.detach())
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
