"""Start torchrun as a child that never outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from examples.gpt.errors import ExampleError

GRACE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


def torchrun(
    script: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    timeout_seconds: float,
    output: IO[str],
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    errors: IO[str] | None = None,
) -> None:
    """Run `script` in `ranks` local processes until it ends, and stream its stdout to `output`.

    Its stderr goes to `errors`, or to this process's. If a rank fails, torchrun restarts all ranks, at most
    `max_restarts` times. `environment` is added to this process's.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts), str(script), *arguments]
    with _child(command, output, errors, environment) as child:
        try:
            code = child.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise ExampleError(f"the run did not end within {timeout_seconds:.0f} seconds") from None
    if code != 0:
        raise ExampleError(f"the run failed (torchrun exited with {code}); see its output above")


@contextmanager
def _child(
    command: Sequence[str],
    output: IO[str],
    errors: IO[str] | None = None,
    more: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(more or {})}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whatever its name resolves to
    # preexec_fn is safe here: this process has one thread.
    child = subprocess.Popen(
        command,
        env=environment,
        stdout=output.fileno(),
        stderr=None if errors is None else errors.fileno(),
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    try:
        yield child
    finally:
        _end(child)


def _end_with_parent() -> None:
    """Ask Linux to end torchrun, which then ends its workers, if this process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask torchrun to end its workers, and kill what is left after the grace period."""
    if child.poll() is not None:
        return
    # torchrun starts each worker in its own session, so they are not in its process group.
    family = [child.pid, *_descendants(child.pid)]
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        family += [pid for pid in _descendants(child.pid) if pid not in family]
        for pid in family:
            _kill_group(pid)
        child.wait()


def processes_with(variable: str, value: str) -> list[tuple[int, str]]:
    """Ids and names of the processes with this variable in their environment (Linux only; none elsewhere)."""
    entry, found = f"{variable}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append((int(folder.name), (folder / "comm").read_text().strip()))
        except OSError:
            continue  # already ended, or not ours
    return found


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # already ended, or has no process group


def _descendants(pid: int) -> list[int]:
    """All descendants of `pid` (Linux only; none elsewhere, so that only torchrun is signaled)."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in file.read_text().split()]
        except OSError:
            continue  # the thread has ended
        for child in children:
            found += [child, *_descendants(child)]
    return found
