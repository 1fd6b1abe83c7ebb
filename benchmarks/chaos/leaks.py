"""What processes leave behind: processes, shared segments, files, listening sockets."""

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


def listening_sockets() -> set[str]:
    """The inodes of all TCP sockets of this machine (its network namespace) that listen."""
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
    """What this process holds now, but for the sockets that it was born with."""
    own = set(open_sockets().values()) - set(sockets_before)
    return Footprint(segments_of(), own & listening_sockets())


def adopt_orphans() -> None:
    """From now on processes whose parent ends become children of this one, so that none gets away."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def children() -> set[int]:
    """The processes that this one has started or adopted and that have not been waited for."""
    lists = [(thread / "children").read_text() for thread in Path("/proc/self/task").iterdir()]
    return {int(pid) for text in lists for pid in text.split()}


def end_child(pid: int) -> str:
    """Kills a child that should not be there, and tells what it was; nothing of one that had ended."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "" if state == "Z" else f"process {pid} ({name})"
    return ""


class Inventory:
    """What there is before a trial, to tell what it leaves."""

    def __init__(self) -> None:
        self._children = children()
        self._files = shared_files()

    def leaks(self, footprints: Collection[Footprint]) -> list[str]:
        """What is there that was not, or that a rank held; kills left processes, after looking at what they hold."""
        segments = {segment for footprint in footprints for segment in footprint.segments}
        listening = {inode for footprint in footprints for inode in footprint.listening}
        found = [f"a shared segment held by process {pid}" for pid in holders_of(segments)]
        found += [f"/dev/shm/{name}" for name in sorted(shared_files() - self._files)]
        found += [f"a listening socket, inode {inode}" for inode in sorted(listening & listening_sockets())]
        found += [text for pid in sorted(children() - self._children) if (text := end_child(pid))]
        return found
