"""Ways to end a process at a chosen instant, and to see what it has left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

SEGMENT = "memfd:torchddp"
_CLOCK_MONOTONIC = 1


class _SignalEvent(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),  # 0: a signal to the process
        ("padding", ctypes.c_char * 48),
    ]


class _TimerSpec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


def die_in(delay_us: int, log: Path) -> None:
    """SIGKILL to this process in `delay_us` microseconds, wherever it is then; writes the time of death to `log`."""
    log.write_text(str(time.monotonic() + delay_us / 1e6))
    if delay_us == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    libc = ctypes.CDLL(None, use_errno=True)
    timer = ctypes.c_void_p()
    event = _SignalEvent(None, signal.SIGKILL, 0, b"")
    spec = _TimerSpec(0, 0, delay_us // 1_000_000, delay_us % 1_000_000 * 1000)
    if libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0:
        raise OSError(ctypes.get_errno(), "timer_create")
    if libc.timer_settime(timer, 0, ctypes.byref(spec), None) != 0:
        raise OSError(ctypes.get_errno(), "timer_settime")


def segments_of(pid: int | str = "self") -> set[str]:
    """The shared segments that a process maps, each by a number that no other segment of this machine has."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()  # it has ended, or is another user's
    return {line.split()[4] for line in lines if SEGMENT in line}


def holders_of(segments: set[str]) -> list[int]:
    """The processes that still map one of these segments."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if segments_of(pid) & segments]


def shared_files() -> set[str]:
    """What lies in /dev/shm under a name of ours; a segment must have none at all."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "torchddp" in entry.name}
