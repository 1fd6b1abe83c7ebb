"""Waits of the main thread that run signal handlers, and end with any exception that one raises.

torch's own waits delay handlers until they return. For C++ see Note [Signals in a wait] in csrc/common/signals.h.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from torchddp import _C
from torchddp.errors import TransportError

_SLICE_S = 0.25
_PATIENCE_S = 2.0
_processes: weakref.WeakKeyDictionary[dist.ProcessGroup, Sequence[dict[str, Any]]] = weakref.WeakKeyDictionary()


def run_collective(
    start: Callable[[], Any], group: dist.ProcessGroup, doing: str, advice: str = _C.advice_for_a_lost_peer
) -> None:
    """Start an operation of this group and wait for it. Raises the errors of `started`."""
    started(start, group, doing, advice)()


def started(
    start: Callable[[], Any], group: dist.ProcessGroup, doing: str, advice: str = _C.advice_for_a_lost_peer
) -> Callable[[], None]:
    """Start an operation of this group, and return a function that waits for it, with signal handlers if it is gloo's.

    TransportError: it failed; names the rank, what it was ``doing``, and which other ranks are known to be gone.
    """
    check_not_forked(group)
    try:
        work = start()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # from the backend, which has lost a connection
        is_lost = type(error) in (RuntimeError, dist.DistBackendError)  # whose text is quoted
        raise _failed(group, doing, error, advice) from (None if is_lost else error)

    def wait() -> None:
        try:
            if isinstance(work, dist.Work):
                _C.wait_for_work(work, group)
            else:
                work.wait()  # not one of torch's
        except TransportError as error:
            raise _failed(group, doing, error, advice) from None  # which quotes it

    return wait


def note_peers(process_group: dist.ProcessGroup, by_rank: Sequence[dict[str, Any]]) -> None:
    """Remember the processes of this group's ranks (`process_identity`), so that errors can say which are gone."""
    _processes[process_group] = by_rank


def peers_of(process_group: dist.ProcessGroup) -> Sequence[dict[str, Any]]:
    """By rank; empty if they are not known."""
    return _processes.get(process_group, ())


def check_not_forked(group: dist.ProcessGroup) -> None:
    """TransportError in a child that a rank has forked: it has none of the group's threads, and isn't the rank."""
    known = peers_of(group)
    if known and known[group.rank()]["pid"] != os.getpid():
        raise TransportError(f"this process was forked from rank {group.rank()}, and can't use its process group")


def _failed(group: dist.ProcessGroup, doing: str, error: Exception, advice: str) -> TransportError:
    cause = str(error).partition("\nException raised from ")[0].rstrip(".")  # torch's backtrace follows
    lost = _lost(group)
    if f" is {GONE}" in lost and advice == _C.advice_for_a_lost_peer:
        advice = _C.advice_for_a_peer_gone
    return TransportError(f"{lost}rank {group.rank()}: {doing} failed: {cause}.{advice}")


def _lost(group: dist.ProcessGroup) -> str:
    """A dying process closes its connections before it disappears, so this keeps looking for a while."""
    deadline_s = time.monotonic() + _PATIENCE_S
    known = peers_of(group)
    while known:
        states = {rank: look_up(who) for rank, who in enumerate(known)}
        gone = [f"rank {rank} is {state}" for rank, state in states.items() if state in (GONE, STOPPED)]
        if gone or time.monotonic() > deadline_s:
            return f"{', '.join(gone)}.\n" if gone else ""
        time.sleep(0.005)
    return ""


def wait_for_future(future: torch.futures.Future[Any], limit_s: float) -> bool:
    """Wait until the future is complete, successfully or not; False if that takes longer."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(min(limit_s, threading.TIMEOUT_MAX))


def wait_for_keys(store: Store, keys: Sequence[str], timeout: datetime.timedelta) -> None:
    """Like ``store.wait(keys, timeout)``, with the errors of torch's stores."""
    deadline_s = time.monotonic() + timeout.total_seconds()
    while True:
        begun_s = time.monotonic()
        slice_s = min(_SLICE_S, max(0.001, deadline_s - begun_s))
        try:
            store.wait(list(keys), datetime.timedelta(seconds=slice_s))
            return
        except RuntimeError:
            now_s = time.monotonic()
            # It failed before its own limit, so not because of time.
            if now_s >= deadline_s or now_s - begun_s < slice_s * 0.9:
                raise


# --- the ranks' processes, as reported by their host's kernel ---


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
        # Bytes: the name before the bracket may end in the middle of a character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19]), bool(int(fields[6]) & _EXITING)
    return "X", 0, True
