"""Which process a rank is, and what has become of it, as the kernel of its host tells."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

_EXITING = 0x4  # PF_EXITING of the kernel


def identity() -> dict[str, Any]:
    """``{"host", "pid", "kernel", "started"}`` of this process. Ranks with one ``kernel`` see each other in /proc."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "kernel": _kernel(), "started": _stat(os.getpid())[1]}


def is_here(who: dict[str, Any]) -> bool:
    """Whether that process is one of this host, whose /proc tells of it."""
    return bool(who["kernel"]) and who["kernel"] == _kernel()


def look_up(who: dict[str, Any] | None) -> str | None:
    """'running', 'stopped' or 'gone'; None where this host can't tell (another host, or an identity not known)."""
    if who is None or not is_here(who):
        return None
    state, started, exits = _stat(who["pid"])
    if started != who["started"] or state in "ZX" or exits:  # the number may belong to another process by now
        return "gone"
    return "stopped" if state in "Tt" else "running"


def _kernel() -> str:
    """The boot and the namespace in which process numbers hold; empty where /proc does not tell."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _stat(pid: int) -> tuple[str, int, bool]:
    """State and start time of a process, and whether it is being ended; ('X', 0, True) if there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19]), bool(int(fields[6]) & _EXITING)
    return "X", 0, True
