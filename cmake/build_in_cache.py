"""Compiles the extension for this interpreter's torch into a user's cache: the program behind `torchddp build`.

    python build_in_cache.py CACHE TARGET

One process at a time compiles in a cache; others wait, and find the file if it was the same. Prints "N/M ..." as steps
are done. If whoever started it goes away, its end of this process's standard input closes: then the compilers end, and,
as after any failure, nothing stays in the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import driver
import torch_facts

SOURCE = Path(__file__).resolve().parent.parent
LOCK_WITHIN_S = 1800
UNFINISHED = "building-"

abandoned = threading.Event()


def end_with_parent() -> None:
    """Stops all that this process has started when its standard input closes."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # meant for the others of this process group

    def wait() -> None:
        os.read(0, 1)
        abandoned.set()
        while True:  # a step may just be starting the next program; the main thread exits after the first that fails
            os.killpg(0, signal.SIGTERM)  # not SIGKILL, with which Ninja would leave its compilers running
            time.sleep(0.1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Holds the lock of the folder, which the kernel releases if this process dies."""
    until, told = time.monotonic() + LOCK_WITHIN_S, False
    while True:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(folder), os.stat(cache)):  # not one that its last owner has removed
                break
        os.close(folder)
        if time.monotonic() > until or abandoned.is_set():
            raise SystemExit(
                f"torchddp: another process has been compiling in {cache} for {LOCK_WITHIN_S // 60} minutes"
            )
        if not told:
            print("torchddp: waiting for another process that compiles in this cache", flush=True)
        told = True
        time.sleep(0.2)
    try:
        yield
    finally:
        os.close(folder)


def compile_into(target: Path) -> None:
    """Puts the file at its place at once, complete."""
    for left_by_a_kill in target.parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=target.parent))
    try:
        driver.configure(SOURCE, folder / "build", folder, target.name)
        driver.run_ninja(folder / "build", NINJA_STATUS="%f/%t ")
        os.replace(folder / target.name, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    cache, target = map(Path, sys.argv[1:])
    end_with_parent()
    driver.check_torch(SOURCE, torch_facts.facts()["TORCH_VERSION"])
    with locked(cache):
        if target.exists():
            return
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            compile_into(target)
        finally:
            with contextlib.suppress(OSError):  # only empty ones go
                for folder in (target.parent, *target.parent.parents):
                    folder.rmdir()
                    if folder == cache:
                        break


if __name__ == "__main__":
    main()
