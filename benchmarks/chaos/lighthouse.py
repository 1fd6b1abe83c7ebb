"""torchft's lighthouse in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

from benchmarks.chaos.worker import end_with_parent

_JOIN_MS, _HEARTBEAT_MS, _TICK_MS = 2000, 1000, 50


def _serve(min_replicas: int, pipe: Connection) -> None:
    from torchft.coordination import LighthouseServer

    end_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it writes a line for every request
    server = LighthouseServer("[::]:0", min_replicas, _JOIN_MS, _TICK_MS, _HEARTBEAT_MS)
    pipe.send(server.address())
    signal.pause()


@contextlib.contextmanager
def lighthouse(min_replicas: int = 1) -> Iterator[str]:
    """Runs a lighthouse during the block; yields its address."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(min_replicas, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()
