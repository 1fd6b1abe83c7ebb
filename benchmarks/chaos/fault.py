"""Injects a fault into this rank at exactly the point that its trial names."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Collection

import torch

from benchmarks.chaos import plan
from benchmarks.chaos.leaks import open_sockets
from benchmarks.chaos.plan import Trial

SLOW_S = 0.7
_SHM_LIMIT_MB = "0.1"  # the model's gradients are 0.25 MiB
_FILE_LIMIT_BYTES = 64 * 1024


class InjectedError(RuntimeError):
    """The exception of a trial."""


def close_sockets(spared: Collection[str], store_port: int) -> int:
    """Shuts down this process's connections to its peers and returns their number.

    Args:
        spared: inodes of sockets to leave alone: those that the process inherited.
        store_port: connections from or to this port belong to the store and are left alone.
    """
    count = 0
    for fd, inode in open_sockets().items():
        if inode in spared:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and store_port in (connection.getsockname()[1], connection.getpeername()[1]):
                continue
            connection.getpeername()  # OSError if it is a listening socket
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def _run_short(shortage: str) -> None:
    if shortage == "shm_limit":
        os.environ["TORCHDDP_SHM_LIMIT_MB"] = _SHM_LIMIT_MB
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _leave_an_orphan() -> None:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)


class Injector:
    """Injects the trial's fault once, on its rank only.

    Args:
        announce: called just before the fault, which may end the process.
        spared, store_port: see `close_sockets`.
    """

    def __init__(
        self, trial: Trial, rank: int, announce: Callable[[], None], spared: Collection[str], store_port: int
    ) -> None:
        self._trial = trial
        self._armed = rank == trial.rank
        self._announce = announce
        self._spared = spared
        self._store_port = store_port
        self._gradients = 0
        self.model: torch.nn.Module | None = None  # whose weights `CORRUPT` changes
        self.step = -1  # set by the training loop; -1 during construction

    def visit(self, phase: str, *_: int) -> None:
        """Called when training reaches this phase of the step."""
        if not self._armed:
            return
        trial = self._trial
        if phase == plan.CONSTRUCTION:
            if trial.phase == plan.CONSTRUCTION:
                self._strike()
            return
        if self.step != trial.step:
            return
        if phase == "hook":
            if trial.phase == "launch" and self._gradients == 0:
                # Runs after the whole graph, before the reducer's own callback, which waits for the buckets.
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._strike())
            reached = self._gradients == trial.gradient
            self._gradients += 1
            if not reached:
                return
        if phase == trial.phase:
            self._strike()

    def _strike(self) -> None:
        self._armed = False
        self._announce()
        kind = self._trial.kind
        if kind == plan.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == plan.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == plan.EXCEPTION:
            raise InjectedError(f"injected at step {self._trial.step}, {self._trial.phase}")
        elif kind == plan.SLOW:
            time.sleep(SLOW_S)
        elif kind == plan.SOCKET:
            if close_sockets(self._spared, self._store_port) == 0:
                raise AssertionError("there was no connection to close")
        elif kind == plan.FULL:
            _run_short(self._trial.shortage)
        elif kind == plan.ORPHAN:
            _leave_an_orphan()
        elif kind == plan.CORRUPT:
            assert self.model is not None
            with torch.no_grad():
                list(self.model.parameters())[-1].add_(1.0)
