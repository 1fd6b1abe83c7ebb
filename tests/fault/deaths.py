"""A way to end a process at a chosen instant."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

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
