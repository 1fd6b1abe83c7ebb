"""MPI's all-reduce, by two libraries: each rank talks to a companion process per library, which its launcher starts."""

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
    """A library of MPI from the package index, which lies in the Python environment's own folders."""

    name: str
    soname: str
    # Its own name, where there is one: both have a `mpiexec`, and the one installed last stays.
    launcher: str
    options: Sequence[str] = ()
    # Where ranks take turns: not to wait busily for a rank that has no processor.
    options_to_yield: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, program: Sequence[str], world_size: int) -> list[str]:
        """Starts `program` once for each rank; RuntimeError where the library is not installed."""
        launcher = Path(sys.prefix, "bin", self.launcher)
        if importlib.util.find_spec("mpi4py") is None or not (launcher.exists() and self._path.exists()):
            raise RuntimeError(EXTRA)
        yielding = self.options_to_yield if world_size > len(os.sched_getaffinity(0)) else ()
        return [str(launcher), *self.options, *yielding, "-n", str(world_size), *program]

    def variables(self) -> dict[str, str]:
        """The environment of the launcher and of what it starts."""
        return {**os.environ, **self.environment, "MPI4PY_LIBMPI": str(self._path)}

    @property
    def _path(self) -> Path:
        return Path(sys.prefix, "lib", self.soname)


MPICH_LIBRARY = MpiLibrary(name="mpich", soname="libmpi.so.12", launcher="mpiexec.hydra")
OPEN_MPI_LIBRARY = MpiLibrary(
    name="openmpi",
    soname="libmpi.so.40",
    launcher="ompirun_wrapper",
    # Not bound to a processor: no rank of the others is. As many ranks as asked for, whatever there is.
    options=("--bind-to", "none", "--oversubscribe"),
    options_to_yield=("--mca", "mpi_yield_when_idle", "1"),
    environment={
        "OPAL_PREFIX": sys.prefix,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    },
)


class Launcher:
    """The companions of all ranks, as rank 0 starts them. They end with their ranks, and their launcher with them."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()
        # In a session of its own: Ctrl-C is for the benchmark, whose end they notice.
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
        """Why the companions will not come; empty while they may."""
        code = self._process.poll()
        if code is None and time.monotonic() < self._deadline_s:
            return ""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        said = next((line for line in reversed(lines) if line.strip("-= ")), "nothing")
        what = f"did not start within {START_TIMEOUT_S:g} s" if code is None else f"ended with code {code}"
        return f"its processes {what}, the last they said: {said}"

    def end(self) -> None:
        """Wait for companions that were told to end, and stop them if that takes long."""
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.stop()

    def stop(self) -> None:
        """End it, and so its processes."""
        self._process.terminate()


def listen() -> tuple[socket.socket, str]:
    """A socket without a file, and its address after the zero byte."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel finds a name
    listener.listen(1)
    listener.settimeout(POLL_S)
    return listener, listener.getsockname()[1:].decode()


def accept(listener: socket.socket) -> Connection | None:
    """Who connects within `POLL_S`, if it is a process of this user's."""
    try:
        way, _ = listener.accept()
    except TimeoutError:
        return None
    _, user, _ = struct.unpack("3i", way.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        way.close()
        return None
    way.setblocking(True)
    return Connection(way.detach())


class Link:
    """The way to this rank's companion: one answer for each question."""

    def __init__(self, name: str, rank: int, channel: Connection) -> None:
        self._whose = f"{name} on rank {rank}"
        self._channel = channel

    def greet(self, meeting_path: str) -> str:
        """Say whose companion it is and where companions meet; the version of its library."""
        self._channel.send((os.getpid(), meeting_path))
        version: str = self._channel.recv()
        return " ".join(version.split(",")[0].split())

    def ask(self, method: str, *arguments: Any) -> Any:
        """The result of a method of `Calls`; RuntimeError if it failed or the companion is gone."""
        try:
            self._channel.send((method, arguments))
            result, error = self._channel.recv()
        except (EOFError, OSError):
            result, error = None, "its process ended"
        if error is not None:
            raise RuntimeError(f"{self._whose}: {error}")
        return result

    def close(self) -> None:
        """The companion ends, if it has not."""
        with contextlib.suppress(OSError):
            self._channel.send(companion.END)
        self._channel.close()


@dataclass
class CompanionTrial:
    """An all-reduce in place, on memory of the companion."""

    name: str
    link: Link
    checked: Check

    def time_ns(self, lead_in: int) -> int:
        time_ns: int = self.link.ask("time_ns", lead_in)
        return time_ns

    def check(self) -> None:
        self.checked.refuse(self.link.ask("check"), self.checked.numel)


class Companions:
    """A library of MPI, as an implementation; collective. It knows all_reduce only."""

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
        """This rank's companion, when every rank has its own."""
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
