"""The servers that ranks talk to, each in its own process.

They don't run in the launcher, whose forks would inherit any lock that a server's thread holds at that moment.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from benchmarks.chaos.worker import end_with_parent

_JOIN_MS, _HEARTBEAT_MS, _TICK_MS = 2000, 1000, 50


def _serve(make: Callable[[], tuple[Any, Any]], pipe: Connection) -> None:
    end_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a lighthouse writes a line for every request
    server, address = make()
    pipe.send(address)
    while server is not None:
        signal.pause()


@contextlib.contextmanager
def _served(make: Callable[[], tuple[Any, Any]]) -> Iterator[Any]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(make, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()
        ours.close()


def _make_store() -> tuple[Any, int]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def _make_lighthouse(min_replicas: int) -> tuple[Any, str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer("[::]:0", min_replicas, _JOIN_MS, _TICK_MS, _HEARTBEAT_MS)
    return server, server.address()


def store() -> contextlib.AbstractContextManager[int]:
    """Runs a store during the block; yields its port. As with torchrun, it outlives the ranks."""
    return _served(_make_store)


def lighthouse(min_replicas: int = 1) -> contextlib.AbstractContextManager[str]:
    """Runs torchft's lighthouse during the block; yields its address.

    Each trial needs a new one, since a lighthouse counts dead replicas of the last trial as members for a while.
    """
    return _served(partial(_make_lighthouse, min_replicas))
