"""Finds leaks: processes, shared segments, files and listening sockets that a trial leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

from benchmarks.chaos.outcome import Footprint

SEGMENT = "memfd:torchddp"
_LISTENS = "0A"
_PR_SET_CHILD_SUBREAPER = 36


def segments_of(pid: int | str = "self") -> set[str]:
    """The shared segments that a process maps, each by a number that is unique on this machine."""
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
    """The names of our files in /dev/shm; segments must not have any."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "torchddp" in entry.name}


def listening_sockets() -> set[str]:
    """The inodes of all listening TCP sockets in this network namespace."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return {fields[9] for fields in lines if fields[3] == _LISTENS}


def open_sockets() -> dict[int, str]:
    """This process's sockets: file descriptor to inode."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("socket:["):
                found[int(entry)] = target[len("socket:[") : -1]
    return found


def footprint(sockets_before: Collection[str]) -> Footprint:
    """The resources that this process holds now, except inherited sockets."""
    own = set(open_sockets().values()) - set(sockets_before)
    return Footprint(segments_of(), own & listening_sockets())


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, so that none escapes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def children() -> set[int]:
    """The processes that this one has started or adopted and not yet waited for."""
    lists = [(thread / "children").read_text() for thread in Path("/proc/self/task").iterdir()]
    return {int(pid) for text in lists for pid in text.split()}


def end_child(pid: int) -> str:
    """Kills a child that should not be there and describes it; returns "" if it had ended."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "" if state == "Z" else f"process {pid} ({name})"
    return ""


class Inventory:
    """A snapshot taken before a trial, to find what it leaves behind."""

    def __init__(self) -> None:
        self._children = children()
        self._files = shared_files()

    def leaks(self, footprints: Collection[Footprint]) -> list[str]:
        """Describes what is new, or was held by a rank and still exists; then kills leftover processes."""
        segments = {segment for footprint in footprints for segment in footprint.segments}
        listening = {inode for footprint in footprints for inode in footprint.listening}
        found = [f"a shared segment held by process {pid}" for pid in holders_of(segments)]
        found += [f"/dev/shm/{name}" for name in sorted(shared_files() - self._files)]
        found += [f"a listening socket, inode {inode}" for inode in sorted(listening & listening_sockets())]
        found += [text for pid in sorted(children() - self._children) if (text := end_child(pid))]
        return found
