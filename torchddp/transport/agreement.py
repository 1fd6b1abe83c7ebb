"""Exchanges of values and agreements among the ranks of a group. Everything here is collective."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import hashlib
import json
import operator
import pickle
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchddp import _C, _torch
from torchddp.errors import TransportError
from torchddp.transport.store import has_store, part_of_store
from torchddp.transport.waits import note_peers, peers_of, process_identity, run_collective, wait_for_keys

Value = TypeVar("Value")
Key = TypeVar("Key", bound=Hashable)
Connection = TypeVar("Connection")

_SAME_CALLS = "All ranks must make the same calls: models are wrapped, and hooks registered, on all or on none"
_DIED = "a peer died, left, or did not get here in time: look for the first error in the other ranks' logs."
_SHOWN_RANKS = 8  # used in the error about missing ranks
# Set in all digests. The first message of torch's DistributedDataParallel looks like a digest, but is the number of
# parameters, which it reads as an int.
_IS_DIGEST = 1 << 30

# --- exchanges: every rank gets every rank's value ---


class GroupExchange:
    """Exchange any picklable values through a process group. (torch's ``all_gather_object`` needs numpy.)

    ``call``: what the program has called, for errors.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device | None = None, call: str = "") -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self._group, self._call = process_group, call
        self._device = device or message_device(process_group)

    def gather(self, value: Value) -> list[Value]:
        own = tensor_of(value).to(self._device)
        lengths = self.gather_integer(own.numel())
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self._device)
        padded[: own.numel()] = own
        return [object_of(data[:length]) for data, length in zip(self._all_gather(padded), lengths, strict=True)]

    def gather_integer(self, value: int) -> list[int]:
        """Like `gather`, for a 64-bit integer, in a single message."""
        own = torch.tensor([value], dtype=torch.int64, device=self._device)
        return [int(received) for received in self._all_gather(own)]

    def _all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(own) for _ in range(self.size)]
        # This is where ranks wait for late ones.
        run_collective(
            lambda: dist.all_gather(received, own, group=self._group, async_op=True),
            self._group,
            "comparing the ranks",
            f" {f'Call {self._call} on all ranks, or on none' if self._call else _SAME_CALLS}. If that is so, {_DIED}",
        )
        return received


class StoreExchange:
    """Exchange JSON values through a store of its own, without a device or backend. ``who``: for errors."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, who: str) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout, self._who = store, timeout, who
        self._rounds = 0

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, in rank order. TransportError with the ranks that did not arrive in time."""
        keys = self._keys(self._rounds)
        self._rounds += 1
        self._store.set(keys[self.rank], json.dumps(value))
        try:
            wait_for_keys(self._store, keys, self._timeout)
        except RuntimeError as error:  # from torch's stores, which don't name the ranks
            if silent := [rank for rank, key in enumerate(keys) if not self._has(key)]:
                shown = ", ".join(map(str, silent[:_SHOWN_RANKS])) + ("..." if len(silent) > _SHOWN_RANKS else "")
                raise TransportError(
                    f"rank {self.rank}: {self._who} got no answer from rank {shown} within {self._timeout}: {error}"
                ) from error
        if self._store.has_extended_api():  # type: ignore[attr-defined]  # torch's stubs lack it
            return [json.loads(value) for value in self._store.multi_get(keys)]
        return [json.loads(self._store.get(key)) for key in keys]

    def close(self) -> None:
        """Remove all keys, for a store that may be reused. Every rank calls it after its last gather."""
        if self._store.add("left", 1) < self.size:
            return
        for key in [*(key for number in range(self._rounds) for key in self._keys(number)), "left"]:
            self._store.delete_key(key)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return False  # the store is gone

    def _keys(self, number: int) -> list[str]:
        return [f"{number}/{rank}" for rank in range(self.size)]


class GroupStoreExchange:
    """Like `GroupExchange`, through the group's store.

    For groups that only move tensors of a device: a first message would create a communicator, in seconds and with some
    hundred megabytes of the device's memory, which a model with a transport of its own may never need again.
    """

    def __init__(self, process_group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
        self.rank, self.size = process_group.rank(), process_group.size()
        self._group, self._timeout = process_group, timeout

    def gather(self, value: Value) -> list[Value]:
        store = part_of_store(self._group, "exchange")
        exchange = StoreExchange(store, self.rank, self.size, self._timeout, "comparing the ranks")
        received = exchange.gather(pickle.dumps(value).hex())
        exchange.close()
        return [pickle.loads(bytes.fromhex(text)) for text in received]

    gather_integer = gather


class TransportExchange:
    """Exchange lists of numbers through a transport, which works with any process group.

    ``kind``: int for 64-bit integers, which stay exact, or float; fixed by the caller, because a number that is whole
    on one rank may not be on another. ``device``: where the transport works. ``timeout``: zero for its own.
    ``waits``: a context for the waits.
    """

    def __init__(
        self,
        transport: _C.Transport,
        kind: type[int] | type[float],
        device: torch.device,
        timeout: datetime.timedelta = datetime.timedelta(0),
        waits: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport, self._device, self._timeout, self._waits = transport, device, timeout, waits
        self._dtype = torch.int64 if kind is int else torch.float64
        # Rejects non-integers, because torch would truncate them.
        self._exact: Callable[[Any], float] = operator.index if kind is int else float

    def gather(self, value: Sequence[float]) -> list[list[Any]]:
        """Return every rank's numbers, in rank order; all ranks give the same count."""
        own = self._tensor(value)
        if self.size == 1:
            return [own.tolist()]
        received = torch.empty(self.size * own.numel(), dtype=own.dtype, device=own.device)
        work = self._transport.make_work()
        with self._waits():
            self._transport.all_gather(received, own, work)
            work.wait(self._timeout)
        return received.view(self.size, -1).tolist()

    def of_rank_0(self, value: Sequence[float]) -> list[Any]:
        """Return rank 0's numbers; all ranks give the same count."""
        tensor = self._tensor(value)
        if self.size > 1:
            work = self._transport.make_work()
            with self._waits():
                self._transport.broadcast(tensor, 0, work)
                work.wait(self._timeout)
        return tensor.tolist()

    def _tensor(self, numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor([self._exact(n) for n in numbers], dtype=self._dtype, device=self._device)


# --- messages and keys ---


def message_device(process_group: dist.ProcessGroup, otherwise: torch.device | None = None) -> torch.device:
    """The device for messages that start on the CPU: the CPU, if the group supports it; ``otherwise``, if it does."""
    types = [device.type for device in process_group._device_types]
    if "cpu" in types or not types:
        return torch.device("cpu")
    return otherwise if otherwise is not None and otherwise.type in types else torch.device(types[0])


def tensor_of(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def object_of(data: torch.Tensor) -> Any:
    """The inverse of `tensor_of`. Avoids numpy, which neither torch nor this package requires."""
    data = data.cpu().contiguous()
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))


# --- ranks, hosts, backends ---


def group_timeout(process_group: dist.ProcessGroup, device_type: str = "cpu") -> datetime.timedelta:
    """How long the group's own operations may take."""
    return _C.timeout_of(process_group, torch.device(device_type))


def backend_of(process_group: dist.ProcessGroup, device_type: str) -> _torch.Backend | None:
    """The group's backend for tensors on this type of device; None if it has none."""
    try:
        return process_group._get_backend(torch.device(device_type))
    except RuntimeError:
        return None


def ranks_by(values: Iterable[Key]) -> dict[Key, list[int]]:
    """The ranks that have each value, ordered by first rank."""
    found: dict[Key, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def list_problems(by_rank: Sequence[str]) -> str:
    """The distinct problems, each with its ranks, since ranks may share one. "" if there are none."""
    return "; ".join(
        f"rank {', '.join(map(str, ranks))}: {problem}" for problem, ranks in ranks_by(by_rank).items() if problem
    )


def host_of(rank: int) -> str:
    """Equal for ranks of one host. A rank whose /proc doesn't tell, as in some sandboxes, is a host of its own."""
    try:
        return _C.host_identity()
    except RuntimeError:
        return f"of rank {rank}"


def ranks_of_hosts(exchange: GroupExchange | StoreExchange) -> list[list[int]]:
    """The ranks of each host, ordered by first rank, grouped by host identity regardless of how they were started."""
    return list(ranks_by(exchange.gather(host_of(exchange.rank))).values())


def ranks_per_host(exchange: TransportExchange) -> int:
    hosts = exchange.gather([zlib.crc32(host_of(exchange.rank).encode())])
    return max(map(len, ranks_by(host for (host,) in hosts).values()))


# --- agreements ---


def gather_if_different(
    value: Value, exchange: GroupExchange | GroupStoreExchange, digests: TransportExchange | None = None
) -> list[Value] | None:
    """Every rank's value, in rank order; None if all have the same `repr`, which costs one integer per rank."""
    if exchange.size == 1:
        return None
    digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:4], "big") >> 2 | _IS_DIGEST
    received = exchange.gather_integer(digest) if digests is None else [n for (n,) in digests.gather([digest])]
    if without_digest := [str(rank) for rank, theirs in enumerate(received) if not theirs & _IS_DIGEST]:
        raise RuntimeError(
            f"rank {exchange.rank}: rank {', '.join(without_digest)} sent something other than a description to "
            "compare, as torch.nn.parallel.DistributedDataParallel does when it is constructed. Use the same class, "
            "torchddp's or torch's, on all ranks, and make the same calls."
        )
    return None if len(set(received)) == 1 else exchange.gather(value)


class Agreement:
    """Collective: the ranks compare what must be equal on all of them before they go on together.

    As a context, an error on one rank before its `verify` reaches all of them:

        with Agreement("OSS", group) as agreement:
            ...  # this rank's own checks
            agreement.verify(lines)

    That rank raises its error, the others a RuntimeError that quotes it. A context without `verify` only passes errors
    on, to ranks that agree on something else there.

    ``who``: the class or function whose ranks agree, for errors. ``process_group``: None: only this process.
    ``device``: of the model, for groups that only work with such devices. ``digests``: how equal ranks find out that
    they are, where all are known to have the same transport. ``call``: of ``who``, where it has several.
    """

    def __init__(
        self,
        who: str,
        process_group: dist.ProcessGroup | None,
        device: torch.device | None = None,
        digests: TransportExchange | None = None,
        call: str = "",
    ) -> None:
        self.is_over = process_group is None or process_group.size() == 1
        self._who, self._group, self._device, self._digests = who, process_group, device, digests
        self._call = call

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self.is_over:
            with contextlib.suppress(TransportError):  # the error itself matters more
                self._exchange(f"{type(error).__name__}: {error}", None)  # the others raise it in their `verify`

    def is_turn(self, number: int) -> bool:
        """Whether this rank does the n-th part of some work that all ranks share."""
        return self._group is None or number % self._group.size() == self._group.rank()

    def verify(self, lines: Sequence[str] = (), options: Mapping[str, str] | None = None) -> None:
        """Raise on every rank if one of them shared an error, or if ``options`` or ``lines`` differ.

        RuntimeError for errors of others and for lines, ValueError for options, by name with the ranks' values.
        """
        by_rank = self.gather((list(lines), dict(options or {})))
        if by_rank is None:
            return
        by_rank_lines, given = [theirs for theirs, _ in by_rank], [given for _, given in by_rank]
        shared = set.intersection(*map(set, given))  # those of parameter groups may differ because the parameters do
        self.check_options([{name: value for name, value in own.items() if name in shared} for own in given])
        if any(theirs != by_rank_lines[0] for theirs in by_rank_lines):
            raise RuntimeError(f"{self._who} needs the same parameters on all ranks. {first_difference(by_rank_lines)}")
        self.check_options(given)

    def gather(self, own: Value) -> list[Value] | None:
        """Like `verify`, but returns every rank's ``own`` if they differ, and otherwise None."""
        by_rank = self._exchange("", own)
        if by_rank is None:
            return None
        if len({who for who, *_ in by_rank}) > 1:
            places = by_value([who for who, *_ in by_rank])
            raise RuntimeError(f"The ranks are in different calls: {places}. Make the same calls on all ranks.")
        if problems := list_problems([problem for _, problem, _ in by_rank]):
            raise RuntimeError(f"{self._who} failed on other ranks: {problems}")
        return [theirs for *_, theirs in by_rank]

    def check_options(self, by_rank: Sequence[Mapping[str, str]]) -> None:
        """Raise ValueError, with names, values and ranks, unless all ranks have given the same."""
        by_option = {name: [given.get(name, "not given") for given in by_rank] for given in by_rank for name in given}
        differ = "; ".join(f"{n} is {by_value(values)}" for n, values in by_option.items() if len(set(values)) > 1)
        if differ:
            raise ValueError(f"{self._who} needs the same options on all ranks: {differ}.")

    def _exchange(self, problem: str, own: object) -> list[Any] | None:
        self.is_over = True
        if self._group is None or self._group.size() == 1:
            return None
        device = message_device(self._group, self._device)
        exchange: GroupExchange | GroupStoreExchange = GroupExchange(self._group, device, self._call)
        if device.type != "cpu" and has_store(self._group):
            exchange = GroupStoreExchange(self._group, group_timeout(self._group, device.type))
        try:
            by_rank = gather_if_different((self._who, problem, own), exchange, self._digests)
        except TransportError as error:
            if self._digests is None:  # the exchange's own text says it
                raise
            where = f"rank {exchange.rank}: comparing the ranks failed in {self._call or self._who}"
            raise TransportError(f"{error}\n{where}. All ranks must make the same calls.") from None
        if by_rank is None and not peers_of(self._group):
            note_peers(self._group, exchange.gather(process_identity()))
        return by_rank


def by_value(values: Sequence[str]) -> str:
    """'True on rank 0, 2, False on rank 1'."""
    return ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_by(values).items())


def in_words(value: object) -> str:
    """The value of an option for comparison: without addresses and numbers of devices, which differ between equals."""
    return re.sub(r" at 0x[0-9a-f]+|(?<=device='cuda):\d+", "", repr(value))


def first_difference(by_rank: Sequence[Sequence[str]]) -> str:
    """A sentence about the first rank that differs from rank 0, and where."""
    reference = by_rank[0]
    for rank, mine in enumerate(by_rank[1:], start=1):
        for theirs, ours in zip(reference, mine, strict=False):
            if theirs != ours:
                return f"On rank {rank} it is {ours}, on rank 0 {theirs}."
        if len(mine) != len(reference):
            longer, rest = (rank, mine) if len(mine) > len(reference) else (0, reference)
            extra = rest[min(len(mine), len(reference))]
            return (
                f"Number of parameters: {len(mine)} on rank {rank}, {len(reference)} on rank 0. The first that only "
                f"rank {longer} has is {extra}."
            )
    return "No difference was found."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """What a rank sends to the others before they connect: JSON values."""

    problem: str = ""  # why it can't connect; empty if it can


AnyPeer = TypeVar("AnyPeer", bound=Peer)


def connect_all(
    exchange: GroupExchange | StoreExchange,
    own: AnyPeer,
    reason_against: Callable[[Sequence[AnyPeer]], str],
    connect: Callable[[Sequence[AnyPeer]], Connection],
) -> Connection | str:
    """Return what ``connect`` creates on every rank, or the same reason for failure on every rank.

    ``reason_against``: why peers without a problem of their own can't connect to each other, or empty; deterministic.
    ``connect`` is collective; if it fails on some rank, the others drop what they have created.
    """
    peers = [dataclasses.replace(own, **theirs) for theirs in exchange.gather(dataclasses.asdict(own))]
    if reason := list_problems([peer.problem for peer in peers]) or reason_against(peers):
        return reason
    made: Connection | str = ""
    problem = ""
    try:
        made = connect(peers)
    except RuntimeError as error:
        problem = str(error) or type(error).__name__
    return list_problems([theirs["problem"] for theirs in exchange.gather({"problem": problem})]) or made


def align_group_counts(process_group: dist.ProcessGroup) -> None:
    """Make groups that these ranks create on their own get the same names on all of them from now on.

    `_torch.new_local_group` names a group by its ranks and the number of groups the rank has created. Ranks that came
    from elsewhere, or are in other groups too, have created fewer or more, and would wait under another name: those
    with fewer catch up by creating single-rank groups.
    """
    exchange = GroupExchange(process_group)
    counts = exchange.gather_integer(_torch.number_of_groups())
    for _ in range(max(counts) - counts[exchange.rank]):
        _torch.new_local_group([dist.get_rank()], backend="gloo")
