"""What the ranks of a process group tell each other outside of its collectives."""

from __future__ import annotations

import datetime
import json
import os
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from torchddp.transport.bounded_calls import BoundedCalls

__all__ = ["Board", "prefix_of_attempt"]

# A store that does not answer (its host is stopped) must not hold the watcher for longer.
_STORE_TIMEOUT = datetime.timedelta(seconds=5)
# Boards so far, by process group and purpose: all ranks count alike.
_boards: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def prefix_of_attempt() -> str:
    """What our keys begin with: torchrun keeps its store when it restarts all ranks, and what is in there."""
    return f"torchddp/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class Board:
    """Values by key, in the store of a process group, over a connection of its own.

    Nothing here waits for another rank, so that it works while collectives hang; what is read may not be there yet.
    Making one is not collective, but all ranks of the group must make as many for the same purpose, in the same order.
    Thread-safe.

    Args:
        process_group: None is the default group. RuntimeError if it has no store (a group that torch does not know).
        purpose: keeps the keys of different users apart.
    """

    def __init__(self, process_group: Any, purpose: str) -> None:
        group: Any = process_group or dist.group.WORLD
        counts = _boards.setdefault(group, {})
        number = counts[purpose] = counts.get(purpose, -1) + 1
        self.rank, self.size = group.rank(), group.size()
        try:
            store: Any = _get_process_group_store(group)
            store = store.clone()
        except Exception as error:
            raise RuntimeError(f"the process group of rank {self.rank} has no store to talk over: {error}") from error
        store.set_timeout(_STORE_TIMEOUT)
        self._calls = BoundedCalls(_STORE_TIMEOUT.total_seconds())
        self._store = dist.PrefixStore(f"{prefix_of_attempt()}/{purpose}/{number}", store)

    def post(self, key: str, value: Any) -> None:
        """Puts a value (of JSON) where every rank can read it. RuntimeError if the store does not answer."""
        text = json.dumps(value)
        self._calls.call(lambda: self._store.set(key, text))

    def read(self, key: str) -> Any:
        """What is there, or None. RuntimeError if the store does not answer."""
        found = self._calls.call(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else json.loads(found)

    def read_of_ranks(self, key: str) -> list[Any]:
        """By rank: what that rank has posted with `post_own`, or None."""
        return [self.read(f"{key}/{rank}") for rank in range(self.size)]

    def post_own(self, key: str, value: Any) -> None:
        """As `post`, for a key that every rank has one of."""
        self.post(f"{key}/{self.rank}", value)

    def add(self, key: str, amount: int) -> int:
        """The sum of what all ranks have added under this key so far, after this."""
        return int(self._calls.call(lambda: self._store.add(f"{key}/sum", amount)))

    def claim(self, key: str) -> bool:
        """True for the first rank that asks for this key, and for no other."""
        return bool(self._calls.call(lambda: self._store.add(f"{key}/claims", 1)) == 1)

    def forget(self, *keys: str) -> None:
        """Takes away what was posted, added up and claimed under these keys."""
        names = [f"{key}{suffix}" for key in keys for suffix in ("", "/sum", "/claims")]
        self._calls.call(lambda: [self._store.delete_key(name) for name in names])
