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
from torchddp.transport import nccl
from torchddp.transport.object_exchange import gather_objects
from torchddp.transport.rank_problems import listed

__all__ = ["CHOICES", "CHOICE_ENV", "LIMIT_ENV", "check_choice", "intended_transport", "limit_bytes", "open_transport"]

logger = logging.getLogger(__name__)

CHOICES = ("auto", "c10d", "shm", "nccl")
CHOICE_ENV = "TORCHDDP_TRANSPORT"
LIMIT_ENV = "TORCHDDP_SHM_LIMIT_MB"
BACKEND_NAME = "torchddp_shm"
# Backends that a transport of ours may stand in for, by device: what they do is known, and nobody put something of
# their own between.
_KNOWN_BACKENDS = {"cpu": ("gloo", BACKEND_NAME), "cuda": ("nccl",)}
# Ranks reach this point within milliseconds of each other: it follows a collective.
_CONNECT_TIMEOUT = datetime.timedelta(seconds=20)
# timedelta.max in microseconds, by which C++ is told, does not fit in 64 bits.
LONGEST_TIMEOUT = datetime.timedelta(days=100 * 365)
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
    """What this rank will try: "c10d", "shm" or "nccl" (that or an error), or "auto": shared memory for parameters on
    the CPU, NCCL for those on CUDA, and c10d where that can't be had.

    Not collective; the answer must be the same on all ranks. ``collective``: whether the ranks may talk to each other
    now.
    """
    choice = check_choice(choice)
    device = devices[0] if devices else torch.device("cpu")
    if choice == "shm" and (elsewhere := next((d for d in devices if d.type != "cpu"), None)) is not None:
        raise ValueError(f"transport='shm' shares memory between CPU tensors, but there are parameters on {elsewhere}")
    if choice == "nccl" and (problem := _not_on_one_gpu(devices)):
        raise ValueError(f"transport='nccl' moves tensors of one CUDA device, but {problem}")
    if choice != "auto":
        return choice
    if len({d.type for d in devices}) > 1:
        reason = f"there are parameters on {' and '.join(map(str, dict.fromkeys(devices)))}"
    else:
        reason = _reason_for_c10d(process_group, device, collective)
    if not reason and device.type == "cuda":
        reason = _reason_against_nccl(devices)
    if reason:
        logger.debug("reducing through the process group: %s", reason)
    return "c10d" if reason else "auto"


def _not_on_one_gpu(devices: Sequence[torch.device]) -> str:
    places = list(dict.fromkeys(devices))
    if all(d.type == "cuda" for d in places) and len(places) == 1:
        return ""
    return f"there are parameters on {' and '.join(map(str, places)) or 'no device'}"


def _reason_against_nccl(devices: Sequence[torch.device]) -> str:
    if not _C.with_cuda:
        return "this torchddp was built without CUDA"
    return _not_on_one_gpu(devices)


def _reason_for_c10d(process_group: Any, device: torch.device, collective: bool) -> str:
    if device.type not in _KNOWN_BACKENDS:
        return f"there are parameters on {device}"
    if not collective:
        return "the ranks were told not to talk to each other here (init_sync=False, or a copy of a module)"
    if device.type == "cpu" and process_group.size() == 1:
        return "there is one rank"
    # A process group written in Python, or a wrapper around one, may do more than reduce.
    backend = _backend(process_group, device.type)
    if type(process_group) is not dist.ProcessGroup or process_group not in _world.pg_map or backend is None:
        return "the process group is none of torch's own"
    if backend.name() not in _KNOWN_BACKENDS[device.type] or "Wrapper" in type(backend).__name__:
        return f"the process group's backend is {type(backend).__name__}"
    return ""


def open_transport(
    choice: str,
    process_group: Any,
    *,
    device: torch.device | None = None,
    timeout: datetime.timedelta | None = None,
) -> _C.Transport:
    """The transport of ``process_group`` for tensors of ``device`` (None: CPU tensors).

    Args:
        choice: "c10d" is the process group itself. "shm" is memory shared by the ranks of a host (several hosts: shared
            inside each, and the process group between them). "nccl" is a NCCL communicator and a stream of its own, for
            CUDA tensors; the process group may be any. "auto" tries shared memory, or NCCL for a CUDA device, and takes
            c10d where that can't be had.
        timeout: how long an operation may take; None: the process group's own limit.

    Collective unless the answer is c10d: every rank must give the same choice.

    Raises:
        ValueError: unknown choice, or one that does not fit the device.
        RuntimeError: "shm" or "nccl", and some rank can't. On all ranks, with rank and reason.
    """
    device = device or torch.device("cpu")
    choice = intended_transport(choice, process_group, (device,), collective=True)
    if choice == "c10d":
        return _C.C10dTransport(process_group)
    timeout = timeout or group_timeout(process_group, device.type)
    outcome: _C.Transport | str
    if device.type == "cuda":
        outcome = nccl.connect(process_group, device, timeout)
    else:
        outcome = _share_memory(process_group, timeout)
    if isinstance(outcome, _C.Transport):
        return outcome
    if choice != "auto":
        raise RuntimeError(f"transport={choice!r} is impossible: {outcome}")
    if process_group.rank() == 0:
        what = "NCCL can't be used directly" if device.type == "cuda" else "memory can't be shared"
        logger.warning("torchddp reduces through the process group, for %s: %s", what, outcome)
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
            endpoint = _C.ShmEndpoint(limit_bytes())
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        card = Card(host, os.geteuid(), endpoint.address if endpoint else "", problem)
        cards = [Card(**other) for other in exchange(dataclasses.asdict(card))]
        return cls(rank, endpoint, cards)

    def reason_against(self) -> str:
        """Why nobody can share memory, the same on all ranks; or nothing."""
        if problem := listed([card.problem for card in self.cards]):
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
        return listed(exchange(problem)) or transport or "unknown"


def _share_memory(process_group: Any, timeout: datetime.timedelta) -> _C.ShmTransport | str:
    """Collective. A transport on every rank, or on every rank the same reason why not."""

    def exchange(value: Any) -> list[Any]:
        return gather_objects(value, process_group)

    meeting = Meeting.of(process_group.rank(), exchange)
    if reason := meeting.reason_against():
        return reason
    hosts = meeting.hosts()
    if len(hosts) > 1 and max(map(len, hosts)) == 1:
        return "no two ranks are on the same host"
    return meeting.connect(exchange, process_group, timeout)


def limit_bytes() -> int:
    """What TORCHDDP_SHM_LIMIT_MB allows a rank; 0: no limit. ValueError for what is no positive number."""
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
            timeout = group_timeout(process_group)
            group = dist.new_group(
                placement.columns[place], backend="gloo", timeout=timeout, use_local_synchronization=True
            )
        _outer_groups[process_group] = group
    return _outer_groups[process_group]


def _backend(process_group: Any, device_type: str) -> Any:
    try:
        return process_group._get_backend(torch.device(device_type))
    except RuntimeError:
        return None


def group_timeout(process_group: Any, device_type: str = "cpu") -> datetime.timedelta:
    options = getattr(_backend(process_group, device_type), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, datetime.timedelta) else dist.default_pg_timeout
