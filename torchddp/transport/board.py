"""A key-value board for the ranks of a process group, separate from its collectives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchddp.transport.store import link_of, next_part

Result = TypeVar("Result")


class Board:
    """Values by key in the store of a process group (None: the default one), over the process's `StoreLink`.

    Nothing here waits for another rank, so it works while collectives hang; a value read may not have arrived yet.
    Creating a board is not collective, but all ranks of the group must create the same number per ``purpose`` (which
    separates the keys of users), in the same order. RuntimeError for a group without a store. Thread-safe.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, purpose: str) -> None:
        group = process_group or dist.group.WORLD
        assert group is not None
        self.rank, self.size = group.rank(), group.size()
        self.link = link_of(group)
        self._part = next_part(group, purpose)
        self._life = self.link.life_of(group)

    def post(self, key: str, value: object) -> None:
        """Publish a JSON value for all ranks. RuntimeError if the store doesn't answer."""
        text = json.dumps(value)
        self._call(lambda store: store.set(key, text))

    def read(self, key: str) -> Any:
        """The value, or None. RuntimeError if the store doesn't answer."""
        found = self._call(lambda store: store.get(key) if store.check([key]) else None)
        return None if found is None else json.loads(found)

    def read_of_ranks(self, key: str) -> list[Any]:
        """By rank: the value that the rank published with `post_own`, or None."""
        return [self.read(f"{key}/{rank}") for rank in range(self.size)]

    def post_own(self, key: str, value: object) -> None:
        """Like `post`, under a key of this rank's own."""
        self.post(f"{key}/{self.rank}", value)

    def start_post_own(self, key: str, value: object) -> None:
        """Like `post_own`, without waiting; what fails stays unknown."""
        text = json.dumps(value)
        self.link.start(lambda store: self._mine(store).set(f"{key}/{self.rank}", text))

    def add(self, key: str, amount: int) -> int:
        """Add to the key's counter and return the total over all ranks so far."""
        return int(self._call(lambda store: store.add(f"{key}/sum", amount)))

    def claim(self, key: str) -> bool:
        """True for the first rank that asks for this key, and for no other."""
        return bool(self._call(lambda store: store.add(f"{key}/claims", 1)) == 1)

    def forget(self, *keys: str) -> None:
        """Remove what was posted, added up and claimed under these keys."""
        names = [f"{key}{suffix}" for key in keys for suffix in ("", "/sum", "/claims")]
        self._call(lambda store: [store.delete_key(name) for name in names])

    def _call(self, use: Callable[[Store], Result]) -> Result:
        return self.link.call(lambda store: use(self._mine(store)))

    def _mine(self, store: Store) -> Store:
        return PrefixStore(f"{self._life.result()}/{self._part}", store)
