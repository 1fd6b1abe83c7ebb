"""The ranks' processes, as reported by their host's kernel."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

STOPPED, GONE = "stopped", "gone"
_EXITING = 0x4  # the kernel's PF_EXITING


def process_identity() -> dict[str, Any]:
    """This process's ``{"host", "pid", "kernel", "started"}``. Ranks with equal ``kernel`` see each other in /proc."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "kernel": _kernel(), "started": _stat(os.getpid())[1]}


def is_here(who: dict[str, Any]) -> bool:
    """Whether the process is on this host and visible in /proc."""
    return bool(who["kernel"]) and who["kernel"] == _kernel()


def look_up(who: dict[str, Any] | None) -> str | None:
    """'running', 'stopped' or 'gone'; None if this host can't tell (another host, or an unknown process)."""
    if who is None or not is_here(who):
        return None
    state, started, exits = _stat(who["pid"])
    if started != who["started"] or state in "ZX" or exits:  # the pid may have been reused
        return GONE
    return STOPPED if state in "Tt" else "running"


def _kernel() -> str:
    """The boot id and pid namespace; empty if /proc does not tell."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _stat(pid: int) -> tuple[str, int, bool]:
    """A process's state, start time, and whether it is exiting; ('X', 0, True) if there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19]), bool(int(fields[6]) & _EXITING)
    return "X", 0, True
