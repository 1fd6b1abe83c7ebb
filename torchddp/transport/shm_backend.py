"""Shared memory as a backend of torch.distributed, by the name "torchddp_shm".

    import torchddp
    torch.distributed.init_process_group("torchddp_shm")  # or "cpu:torchddp_shm,cuda:nccl"

All collectives on CPU tensors, for ranks of one host; point-to-point operations need a group with another backend.
"""

from __future__ import annotations

import datetime
import json
import time
from typing import Any

import torch.distributed as dist

from torchddp import _C
from torchddp.transport.select import BACKEND_NAME, Meeting
from torchddp.transport.waits import wait_for_keys

__all__ = ["register"]


def register() -> None:
    """Makes the name known to ``init_process_group`` and ``new_group``. Again: does nothing."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, devices=["cpu"])
        dist.Backend._plugins = _Plugins(dist.Backend._plugins)


class _Plugins(dict[str, Any]):
    """torch's table of backends from elsewhere, without ours when it is listed.

    Where a group is asked for by device ("cpu:gloo"), torch lists the table, and if it is not empty sets no default
    backend: such groups would be called "undefined", and warn when they are destroyed, because torchddp was imported.
    """

    def keys(self) -> Any:
        return {name: None for name in self if name != BACKEND_NAME.upper()}.keys()


def _create(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """What torch calls for each process group. Collective."""
    rounds = _Rounds(store, rank, size, timeout)
    meeting = Meeting.of(rank, rounds.exchange)
    hosts = meeting.hosts()
    reason = meeting.reason_against()
    if not reason and len(hosts) > 1:
        reason = (
            f"rank {hosts[1][0]} is on another host than rank {hosts[0][0]}, or can't see its processes (containers, "
            "network namespaces); use gloo between hosts"
        )
    transport = reason or meeting.connect(rounds.exchange, None, timeout)
    rounds.clean_up()
    if isinstance(transport, str):
        raise RuntimeError(f"rank {rank}: the {BACKEND_NAME} backend can't share memory here: {transport}")
    return _C.make_shm_backend(transport, timeout)


class _Rounds:
    """Exchanges over a store, which leave nothing in it: it may serve the next process group of the same name."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._deadline_s = time.monotonic() + timeout.total_seconds()
        self._timeout = timeout
        self._keys: list[str] = []

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        keys = [f"{len(self._keys)}/{rank}" for rank in range(self._size)]
        self._keys += keys
        self._store.set(keys[self._rank], json.dumps(value))
        return [json.loads(self._get(key, rank)) for rank, key in enumerate(keys)]

    def clean_up(self) -> None:
        """To be called by every rank after its last exchange: the last one removes the keys."""
        if self._store.add("left", 1) < self._size:
            return
        for key in [*self._keys, "left"]:
            self._store.delete_key(key)

    def _get(self, key: str, rank: int) -> bytes:
        left_s = max(0.001, self._deadline_s - time.monotonic())
        try:
            wait_for_keys(self._store, [key], datetime.timedelta(seconds=left_s))
        except RuntimeError as error:  # as torch's stores say it, without saying whose
            raise RuntimeError(
                f"rank {self._rank}: the {BACKEND_NAME} backend heard nothing of rank {rank} within {self._timeout}: "
                f"{error}"
            ) from error
        return self._store.get(key)
