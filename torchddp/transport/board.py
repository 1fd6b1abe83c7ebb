"""A key-value board for the ranks of a process group, separate from its collectives."""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch.distributed as dist

from torchddp.transport.agreement import part_of_store
from torchddp.transport.worker import BoundedCalls

# A store that doesn't answer (its host is stopped) must not block the watcher for longer.
_STORE_TIMEOUT = datetime.timedelta(seconds=5)


class Board:
    """Values by key in the store of a process group, over a separate connection.

    Nothing here waits for another rank, so it works while collectives hang; a value read may not have arrived yet.
    Creating a board is not collective, but all ranks of the group must create the same number per purpose, in the same
    order. Thread-safe.

    Args:
        process_group: None is the default group. RuntimeError if it has no store (a group that torch doesn't know).
        purpose: separates the keys of different users.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, purpose: str) -> None:
        group = process_group or dist.group.WORLD
        assert group is not None
        self.rank, self.size = group.rank(), group.size()
        try:
            # torch's stubs lack clone().
            self._store = part_of_store(group, purpose).clone()  # type: ignore[attr-defined]
        except Exception as error:
            raise RuntimeError(f"the process group of rank {self.rank} has no store to use: {error}") from error
        self._store.set_timeout(_STORE_TIMEOUT)
        self._calls = BoundedCalls(_STORE_TIMEOUT.total_seconds())

    def post(self, key: str, value: object) -> None:
        """Publish a JSON value for all ranks. RuntimeError if the store doesn't answer."""
        text = json.dumps(value)
        self._calls.call(lambda: self._store.set(key, text))

    def read(self, key: str) -> Any:
        """The value, or None. RuntimeError if the store doesn't answer."""
        found = self._calls.call(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else json.loads(found)

    def read_of_ranks(self, key: str) -> list[Any]:
        """By rank: the value that the rank published with `post_own`, or None."""
        return [self.read(f"{key}/{rank}") for rank in range(self.size)]

    def post_own(self, key: str, value: object) -> None:
        """Like `post`, under a key of this rank's own."""
        self.post(f"{key}/{self.rank}", value)

    def add(self, key: str, amount: int) -> int:
        """Add to the key's counter and return the total over all ranks so far."""
        return int(self._calls.call(lambda: self._store.add(f"{key}/sum", amount)))

    def claim(self, key: str) -> bool:
        """True for the first rank that asks for this key, and for no other."""
        return bool(self._calls.call(lambda: self._store.add(f"{key}/claims", 1)) == 1)

    def forget(self, *keys: str) -> None:
        """Remove what was posted, added up and claimed under these keys."""
        names = [f"{key}{suffix}" for key in keys for suffix in ("", "/sum", "/claims")]
        self._calls.call(lambda: [self._store.delete_key(name) for name in names])
