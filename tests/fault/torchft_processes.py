"""Runs a real lighthouse and replicas as child processes that never outlive the run."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_START_S = 60.0  # for the lighthouse, on a busy machine
ROOT = Path(__file__).resolve().parents[2]


class Child:
    """A process whose output can be read line by line with a timeout."""

    def __init__(self, command: list[str], environment: dict[str, str], log: TextIO) -> None:
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        self._lines: queue.Queue[list[str] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.split())
        self._lines.put(None)

    def next_line(self, deadline_s: float) -> list[str]:
        """The words of the next line. RuntimeError if it ends, or prints nothing until ``deadline_s`` (monotonic)."""
        try:
            words = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise RuntimeError("hangs: it printed nothing") from None
        if words is None:
            raise RuntimeError(f"ended with exit code {self.process.wait(10)}")
        return words

    def tell(self, line: str) -> None:
        """Writes a line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Sends SIGKILL if it still runs, and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self, limit_s: float = 10.0) -> None:
        """Closes its stdin and waits; kills it if it does not end."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        self.kill()


def free_port() -> int:
    """A port that is unused now."""
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def lighthouse(log: TextIO, min_replicas: int = 1) -> Iterator[str]:
    """Runs this environment's torchft lighthouse; yields its address. RuntimeError if it does not start."""
    command = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if command is None:
        raise RuntimeError("torchft_lighthouse is not installed: pip install torchft")
    from torchddp.fault_tolerance import check_lighthouse

    port = free_port()
    options = ["--bind", f"[::]:{port}", "--min_replicas", str(min_replicas), "--join_timeout_ms", "2000"]
    process = subprocess.Popen([command, *options], stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                check_lighthouse(address, 1.0)
                break
            except RuntimeError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
        yield address
    finally:
        process.kill()
        process.wait()
