"""The store of a job: one connection of a process besides torch's, and keys that belong to one life of one group."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchddp import _torch
from torchddp.transport.worker import BoundedCalls, Task, watch

Result = TypeVar("Result")

# A store that doesn't answer (its host is stopped) must not block its callers for longer.
TIMEOUT = datetime.timedelta(seconds=5)
_SETUP_PATIENCE_S = 60.0  # where ranks can't do without: their hosts may be overloaded
_MANY_RANKS = 64
_END_LOOK_S = 0.25  # how often to check whether the group was destroyed, which needs no message

# How many parts of a group's store were handed out, by process group and purpose; equal on all ranks.
_parts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()


def home_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The job's default group, if it includes this one: its ranks exchange reports, and all have its store."""
    default = dist.group.WORLD
    return default if default is not None and _torch.is_alive(group) else group


def attempt_prefix() -> str:
    """Of all keys: torchrun keeps its store, with its contents, when it restarts all ranks."""
    return f"torchddp/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def begin_life(store: Store, name: str, rank: int) -> str:
    """A prefix for the keys of a group that begins now: earlier ones of its name may have left theirs in the store.

    All ranks of a group call it once and get the same prefix, because each counts the groups that it was in.
    """
    prefix = f"{attempt_prefix()}/{name}"
    return f"{prefix}/life_{store.add(f'{prefix}/lives/{rank}', 1)}"


class StoreLink:
    """This process's only connection to the store of its job besides torch's own, which a blocking wait may hold.

    A thread of its own makes the calls, so that a store without an answer delays no caller by more than `TIMEOUT`, and
    only once. It ends when the watcher finds that its group was destroyed. Thread-safe. See `link_of`.
    """

    def __init__(self, home: dist.ProcessGroup) -> None:
        torchs = _torch.store_of(home)
        self._home = weakref.ref(home)
        self._store: Store | None = None
        self._problem = ""
        self._holds = 0
        self._lives: weakref.WeakKeyDictionary[dist.ProcessGroup, Future[str]] = weakref.WeakKeyDictionary()
        self._at_end: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._calls = BoundedCalls(TIMEOUT.total_seconds())
        self._calls.start(lambda: self._connect(torchs))
        self._task: Task = watch(self._look, _END_LOOK_S)

    def call(self, use: Callable[[Store], Result], patience_s: float = 0.0) -> Result:
        """``use(store)``. RuntimeError if there is no answer in time, or the group was destroyed."""
        return self._calls.call(lambda: self._use(use), patience_s)

    def start(self, use: Callable[[Store], Result]) -> Future[Result]:
        """Like `call`, without waiting; later calls run after it."""
        return self._calls.start(lambda: self._use(use))

    def life_of(self, group: dist.ProcessGroup) -> Future[str]:
        """The key prefix of this life of the group: complete in the next call."""
        with _lock:
            life = self._lives.get(group)
            if life is None:
                name, rank = f"group_{_torch.name_of(group)}", group.rank()
                life = self._lives[group] = self._calls.start(
                    lambda: self._use(lambda store: begin_life(store, name, rank)), behind_late=True
                )
            return life

    def at_end(self, do: Callable[[], None]) -> None:
        """Call this method on the watcher when the group was destroyed. Doesn't keep the method's object alive."""
        self._at_end = [method for method in self._at_end if method() is not None]
        self._at_end.append(weakref.WeakMethod(do))

    def hold(self, change: int) -> None:
        """1: stay connected even after the group was destroyed, until -1."""
        with _lock:
            self._holds += change

    def is_of(self, home: dist.ProcessGroup) -> bool:
        """Whether it is this group's, and not that of an earlier one with the same id."""
        return self._home() is home

    @property
    def is_over(self) -> bool:
        """Whether its group was destroyed."""
        home = self._home()
        return home is None or not _torch.is_alive(home)

    def _connect(self, torchs: Store) -> None:
        try:
            self._store = torchs.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
            self._store.set_timeout(TIMEOUT)
        except Exception as error:
            self._problem = str(error)

    def _use(self, use: Callable[[Store], Result]) -> Result:
        if self._store is None:
            raise RuntimeError(f"no connection to the store of the process group: {self._problem}")
        try:
            return use(self._store)
        except dist.DistNetworkError as error:
            # A lost connection doesn't come back, and torch would print a page for each further call.
            self._store, self._problem = None, str(error).partition("\n")[0]
            raise

    def _disconnect(self) -> None:
        self._store = None

    def _look(self) -> None:
        if not self.is_over:
            return
        methods, self._at_end = self._at_end, []
        for method in methods:
            if (do := method()) is not None:
                do()
        if self._holds:
            return
        self._task.close()
        with contextlib.suppress(RuntimeError):  # its thread waits for an answer
            self._calls.start(self._disconnect)
        self._calls.end("the process group was destroyed")
        with _lock:
            for key in [key for key, link in _links.items() if link is self]:
                del _links[key]


_links: dict[int, StoreLink] = {}  # by id of the home group
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _links.clear()


os.register_at_fork(after_in_child=_after_fork)


def link_of(group: dist.ProcessGroup) -> StoreLink:
    """This process's link to the store of the group's job; RuntimeError if there is none. Not collective."""
    home = home_of(group)
    with _lock:
        found = _links.get(id(home))
        if found is not None and found.is_of(home) and not found.is_over:
            return found
        try:
            made = _links[id(home)] = StoreLink(home)
        except KeyError as error:
            raise RuntimeError(f"the process group of rank {group.rank()} has no store to use") from error
        return made


def has_store(group: dist.ProcessGroup) -> bool:
    """Whether the group has a store, as all of torch's own have. Not collective."""
    try:
        return _torch.store_of(home_of(group)) is not None
    except KeyError:
        return False


def next_part(group: dist.ProcessGroup, purpose: str) -> str:
    """A prefix for keys within the group's life that no other call gets; all ranks must call it equally often."""
    counts = _parts.setdefault(group, {})
    number = counts[purpose] = counts.get(purpose, -1) + 1
    return f"{purpose}/{number}"


def part_of_store(group: dist.ProcessGroup, purpose: str) -> Store:
    """The store over torch's own connection, for waits, under a fresh key prefix. RuntimeError if there is none."""
    link = link_of(group)
    life = link.life_of(group)
    link.call(lambda _: None, _SETUP_PATIENCE_S)
    return PrefixStore(f"{life.result()}/{next_part(group, purpose)}", _torch.store_of(home_of(group)))


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

    @property
    def load(self) -> float:
        """How much less often the ranks of a large world should look, as all ask the same store."""
        return max(1.0, self.size / _MANY_RANKS)

    def name(self) -> str:
        """The prefix of its keys, which no other board of the job has."""
        return self.link.call(lambda _: f"{self._life.result()}/{self._part}")

    def post(self, key: str, value: object) -> None:
        """Publish a JSON value for all ranks. RuntimeError if the store doesn't answer."""
        text = json.dumps(value)
        self._call(lambda store: store.set(key, text))

    def read(self, key: str) -> Any:
        found = self._call(lambda store: store.get(key) if store.check([key]) else None)
        return None if found is None else json.loads(found)

    def read_of_ranks(self, key: str) -> list[Any]:
        """By rank: the value that the rank published with `post_own`, or None."""
        return [self.read(f"{key}/{rank}") for rank in range(self.size)]

    def post_own(self, key: str, value: object) -> None:
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

    def open_store(self) -> Store:
        """The store with the board's keys, for native threads: over the process's link, so for short calls only."""
        return self._call(lambda store: store)

    def _call(self, use: Callable[[Store], Result]) -> Result:
        return self.link.call(lambda store: use(self._mine(store)))

    def _mine(self, store: Store) -> Store:
        return PrefixStore(f"{self._life.result()}/{self._part}", store)


def try_board(group: dist.ProcessGroup, purpose: str, tell: Callable[[RuntimeError], object]) -> Board | None:
    """A `Board`; None for a group of one rank, and, after ``tell(error)``, for one without a store."""
    if group.size() == 1:
        return None
    try:
        return Board(group, purpose)
    except RuntimeError as error:
        tell(error)
        return None


_logged: set[str] = set()  # by this process, so that later models don't ask the store


def is_first_in_job(what: str, process_group: dist.ProcessGroup) -> bool:
    """Whether this process should log ``what``: true on rank 0 of the group if no group of the job has logged it yet.

    The ranks of a job are those of the default process group, whose store counts; without one, this process is the job.
    Not collective: only rank 0 of each group asks the store.
    """
    if process_group.rank() != 0 or what in _logged:
        return False
    _logged.add(what)
    default = dist.group.WORLD
    if default is None or default.size() == 1:
        return True
    key = f"{attempt_prefix()}/logged/{hashlib.sha256(what.encode()).hexdigest()}"
    try:
        return link_of(default).call(lambda store: store.add(key, 1) == 1)
    except RuntimeError:  # its store is gone or missing
        return True
