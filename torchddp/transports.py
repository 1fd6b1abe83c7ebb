"""Which transport moves the buckets of a process group: chosen together by all its ranks."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from torchddp import _C

__all__ = ["CHOICES", "CHOICE_ENV", "LIMIT_ENV", "check_choice", "intended_transport", "open_transport"]

logger = logging.getLogger(__name__)

CHOICES = ("auto", "c10d", "shm")
CHOICE_ENV = "TORCHDDP_TRANSPORT"
LIMIT_ENV = "TORCHDDP_SHM_LIMIT_MB"
# Backends that a shared-memory transport may stand in for: what they do for CPU tensors is known, and nobody put
# something of their own between.
BACKEND_NAME = "torchddp_shm"
_KNOWN_BACKENDS = ("gloo", BACKEND_NAME)
# Ranks reach this point within milliseconds of each other: it follows a collective.
_CONNECT_TIMEOUT = datetime.timedelta(seconds=20)
_MIB = 1024 * 1024
_outer_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def check_choice(choice: str) -> str:
    """``choice``, or what TORCHDDP_TRANSPORT says where that is "auto". ValueError for anything not in ``CHOICES``."""
    if choice not in CHOICES:
        raise ValueError(f"transport must be {_quoted_choices()}, got {choice!r}")
    wished = os.environ.get(CHOICE_ENV, "")
    if choice != "auto" or not wished:
        return choice
    if wished not in CHOICES:
        raise ValueError(f"{CHOICE_ENV} must be {_quoted_choices()}, got {wished!r}")
    return wished


def _quoted_choices() -> str:
    return f"{', '.join(repr(c) for c in CHOICES[:-1])} or {CHOICES[-1]!r}"


def intended_transport(choice: str, process_group: Any, devices: Sequence[torch.device], *, collective: bool) -> str:
    """What this rank will try: "c10d", "auto" (shared memory if it can be had) or "shm" (that or an error).

    Not collective; the answer must be the same on all ranks. ``collective``: whether the ranks may talk to each other
    now.
    """
    choice = check_choice(choice)
    elsewhere = next((d for d in devices if d.type != "cpu"), None)
    if choice == "shm" and elsewhere is not None:
        raise ValueError(f"transport='shm' shares memory between CPU tensors, but there are parameters on {elsewhere}")
    if choice != "auto":
        return choice
    reason = _reason_against_shared_memory(process_group, elsewhere, collective)
    if reason:
        logger.debug("reducing through the process group: %s", reason)
    return "c10d" if reason else "auto"


def _reason_against_shared_memory(process_group: Any, elsewhere: torch.device | None, collective: bool) -> str:
    if elsewhere is not None:
        return f"there are parameters on {elsewhere}"
    if not collective:
        return "the ranks were told not to talk to each other here (init_sync=False, or a copy of a module)"
    if process_group.size() == 1:
        return "there is one rank"
    # A process group written in Python, or a wrapper around one, may do more than reduce.
    backend = _cpu_backend(process_group)
    if type(process_group) is not dist.ProcessGroup or process_group not in _world.pg_map or backend is None:
        return "the process group is none of torch's own"
    if backend.name() not in _KNOWN_BACKENDS or "Wrapper" in type(backend).__name__:
        return f"the process group's backend is {type(backend).__name__}"
    return ""


def open_transport(choice: str, process_group: Any, *, timeout: datetime.timedelta | None = None) -> _C.Transport:
    """The transport of ``process_group`` for CPU tensors.

    Args:
        choice: "c10d" is the process group itself. "shm" is memory shared by the ranks of a host (several hosts: shared
            inside each, and the process group between them). "auto" tries shared memory, and takes c10d where that
            can't be had.
        timeout: how long an operation may take; None: the process group's own limit.

    Collective unless the answer is c10d: every rank must give the same choice.

    Raises:
        ValueError: unknown choice.
        RuntimeError: "shm", and some rank can't. On all ranks, with rank and reason.
    """
    choice = intended_transport(choice, process_group, (), collective=True)
    if choice == "c10d":
        return _C.C10dTransport(process_group)
    outcome = _share_memory(process_group, timeout or _group_timeout(process_group))
    if isinstance(outcome, _C.Transport):
        return outcome
    if choice == "shm":
        raise RuntimeError(f"transport='shm' is impossible: {outcome}")
    if process_group.rank() == 0:
        logger.warning("torchddp reduces through the process group, for memory can't be shared: %s", outcome)
    return _C.C10dTransport(process_group)


# Gives a value to all ranks, and gets theirs, in rank order.
Exchange = Callable[[Any], list[Any]]


@dataclasses.dataclass
class Card:
    """What a rank tells the others about itself before they share memory."""

    host: str
    user: int
    address: str
    problem: str


@dataclasses.dataclass
class Meeting:
    """What a rank knows once all have told about themselves; any of them may have a problem."""

    rank: int
    endpoint: _C.ShmEndpoint | None
    cards: list[Card]

    @classmethod
    def of(cls, rank: int, exchange: Exchange) -> Meeting:
        """Every rank's card."""
        endpoint, problem, host = None, "", ""
        try:
            host = _C.host_identity()
            endpoint = _C.ShmEndpoint(_limit_bytes())
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        card = Card(host, os.geteuid(), endpoint.address if endpoint else "", problem)
        cards = [Card(**other) for other in exchange(dataclasses.asdict(card))]
        return cls(rank, endpoint, cards)

    def reason_against(self) -> str:
        """Why nobody can share memory, the same on all ranks; or nothing."""
        if problem := _problems([card.problem for card in self.cards]):
            return problem
        users = [card.user for card in self.cards]
        other = next((rank for rank, user in enumerate(users) if user != users[0]), None)
        return "" if other is None else f"rank 0 runs as user {users[0]}, rank {other} as user {users[other]}"

    def hosts(self) -> list[list[int]]:
        """The ranks of each host, in the order of their first ones."""
        by_host: dict[str, list[int]] = {}
        for rank, card in enumerate(self.cards):
            by_host.setdefault(card.host, []).append(rank)
        return list(by_host.values())

    def connect(self, exchange: Exchange, process_group: Any, timeout: datetime.timedelta) -> _C.ShmTransport | str:
        """Collective. A transport on every rank, or on every rank the same reason why not.

        The process group may be None if there is one host.
        """
        transport, problem = None, ""
        try:
            hosts = self.hosts()
            mine = next(ranks for ranks in hosts if self.rank in ranks)
            spans = len(hosts) > 1
            placement = _place(process_group, hosts)
            assert self.endpoint is not None
            transport = self.endpoint.connect(
                process_group,
                local_ranks=mine,
                addresses=[self.cards[rank].address for rank in mine],
                outer_group=_outer_group(process_group, placement) if spans else None,
                places=placement.places,
                outer_ranks=placement.outer_ranks,
                owners=placement.owners,
                spans=spans,
                connect_timeout=_CONNECT_TIMEOUT,
                timeout=timeout,
            )
        except RuntimeError as error:
            problem = str(error)
        self.endpoint = None  # a socket that nobody should wait at
        return _problems(exchange(problem)) or transport or "unknown"


def _share_memory(process_group: Any, timeout: datetime.timedelta) -> _C.ShmTransport | str:
    """Collective. A transport on every rank, or on every rank the same reason why not."""

    def exchange(value: Any) -> list[Any]:
        by_rank: list[Any] = [None] * process_group.size()
        dist.all_gather_object(by_rank, value, group=process_group)
        return by_rank

    meeting = Meeting.of(process_group.rank(), exchange)
    if reason := meeting.reason_against():
        return reason
    hosts = meeting.hosts()
    if len(hosts) > 1 and max(map(len, hosts)) == 1:
        return "no two ranks are on the same host"
    return meeting.connect(exchange, process_group, timeout)


def _problems(by_rank: Sequence[str]) -> str:
    """Different ones only: what one rank can't do, all others may complain of."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problem in enumerate(by_rank):
        if problem:
            ranks_of.setdefault(problem, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {problem}" for problem, ranks in ranks_of.items())


def _limit_bytes() -> int:
    text = os.environ.get(LIMIT_ENV, "")
    if not text:
        return 0
    try:
        limit_mb = float(text)
    except ValueError:
        limit_mb = -1.0
    if not 0 < limit_mb < float("inf"):
        raise ValueError(f"{LIMIT_ENV} must be a positive number of MiB, got {text!r}")
    return max(1, int(limit_mb * _MIB))


@dataclasses.dataclass
class _Placement:
    """Where ranks are, and who reduces what between hosts."""

    owners: int  # the first ranks of each host, which own a shard of every bucket each
    places: list[int]  # by rank: its place among the ranks of its host
    outer_ranks: list[int]  # by rank: its rank among those with its place, or -1 if that owns nothing
    columns: list[list[int]]  # by place below `owners`: the global ranks that have it, ascending


def _place(process_group: Any, hosts: Sequence[Sequence[int]]) -> _Placement:
    owners = min(map(len, hosts))
    size = sum(map(len, hosts))
    places, outer_ranks = [0] * size, [-1] * size
    columns = []
    for ranks in hosts:
        for place, rank in enumerate(ranks):
            places[rank] = place
    for place in range(owners if len(hosts) > 1 else 0):
        # In the order of new_group(), which sorts.
        column = sorted((dist.get_global_rank(process_group, ranks[place]), ranks[place]) for ranks in hosts)
        columns.append([global_rank for global_rank, _ in column])
        for outer_rank, (_, rank) in enumerate(column):
            outer_ranks[rank] = outer_rank
    return _Placement(owners, places, outer_ranks, columns)


def _outer_group(process_group: Any, placement: _Placement) -> Any:
    """The ranks in this one's place on each host, or None if its place owns no shard. One per process group, kept."""
    if process_group not in _outer_groups:
        place = placement.places[process_group.rank()]
        group = None
        if place < placement.owners:
            timeout = _group_timeout(process_group)
            group = dist.new_group(
                placement.columns[place], backend="gloo", timeout=timeout, use_local_synchronization=True
            )
        _outer_groups[process_group] = group
    return _outer_groups[process_group]


def _cpu_backend(process_group: Any) -> Any:
    try:
        return process_group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None


def _group_timeout(process_group: Any) -> datetime.timedelta:
    options = getattr(_cpu_backend(process_group), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, datetime.timedelta) else dist.default_pg_timeout
