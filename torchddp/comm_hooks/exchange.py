"""What compression hooks send: exact sums, and byte messages between ranks or hosts.

Uses separate process groups, so that other messages can't interleave.

Note [Hosts]
~~~~~~~~~~~~
With several hosts, the ranks of each host first sum exactly in shared memory. Each rank then owns a shard of the
bucket, and only that is compressed and sent to the ranks in the same place on the other hosts. Rounding then loses bits
once per host instead of once per rank, and each byte crosses the link once. On a single host every rank counts as a
host, because otherwise nothing would be compressed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp import _C, _torch
from torchddp.comm_hooks import formats
from torchddp.transport import select
from torchddp.transport.agreement import GroupExchange, align_group_counts, group_timeout, ranks_of_hosts
from torchddp.transport.store import is_first_in_job
from torchddp.transport.waits import run_collective

logger = logging.getLogger(__name__)

Hierarchical = bool | Literal["auto"]
_Purpose = tuple[torch.device, Hierarchical, datetime.timedelta]

# Shards begin at multiples of this if they are much larger; it is a multiple of every format's block.
_ALIGNMENT = 1024
_SMALL_ALIGNMENT = 16


@dataclasses.dataclass(eq=False)
class _Groups:
    """The process groups of an exchange, which another one gets when it is gone: torch keeps them until the end.

    ``everyone``: the ranks of the model's group. ``outer``: those in the same place on each host, or everyone.
    ``inner``: those of this host; None: every rank counts as a host. ``begun`` and ``done`` count operations and
    differ after an error: ranks that have done different numbers would get each other's messages.
    """

    everyone: _C.Transport
    outer: dist.ProcessGroup
    inner: _C.Transport | None = None
    purpose: _Purpose | None = None
    is_free: bool = False
    begun: int = 0
    done: int = 0

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        self.begun += 1
        yield
        self.done += 1


# By the group of the models, in the order in which its ranks made them together.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Groups]] = weakref.WeakKeyDictionary()


class Exchange:
    """Collectives of one hook over its own process groups. Used in the same order on all ranks.

    Collective. Operations end within ``timeout`` (None: the process group's limit), with an error of torch's.
    ``hierarchical``: sum exactly inside each host, and compress between hosts: "auto" if there are several with equal
    numbers of ranks; False never; True also where there is one host (then nothing is compressed).

    Attributes:
        members, member: how many ranks exchange messages (one per host, or all), and this rank's index among them.
        is_shared: it uses the model's own group, because torch can't create others of its ranks.
        sent_bytes: passed to the network or to shared memory so far. Exact sums are counted as ring all-reduces; over
            shared memory a rank reads and writes as much of the others' memory.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        hierarchical: Hierarchical = "auto",
        timeout: datetime.timedelta | None = None,
    ) -> None:
        # torch can't create a group of the ranks of a torchft group, so nothing else may use that one during backward.
        self.is_shared = not _torch.is_alive(process_group)
        self.time_limit = timeout
        if self.is_shared:
            self._groups = _Groups(_C.C10dTransport(process_group), process_group)
        else:
            limit = self.time_limit = timeout or group_timeout(process_group, device.type)
            self._groups = _take_groups(process_group, (device, hierarchical, limit))
            weakref.finalize(self, setattr, self._groups, "is_free", True).atexit = False
        self._everyone, self._outer, self._inner = self._groups.everyone, self._groups.outer, self._groups.inner
        self.world_size: int = self._everyone.size
        self.rank: int = self._everyone.rank
        self.members: int = self._outer.size()
        self.member: int = self._outer.rank()
        self.places = 1 if self._inner is None else self._inner.size
        self.place = 0 if self._inner is None else self._inner.rank
        self.process_group = process_group
        self.sent_bytes = 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    def step_after(self, number: int) -> int:
        """The number of the step after step ``number``; the same on all ranks."""
        return number + 1

    # --- exact sums ---

    def sum_(self, flat: Tensor) -> None:
        """In place: the sum over all ranks of fp32 [n], the same bits on each."""
        self._all_reduce(self._everyone, flat)

    def each_ranks(self, value: float, device: torch.device | None) -> list[float]:
        values = torch.zeros(self.world_size, dtype=torch.float64, device=device)
        values[self.rank] = value
        self._all_reduce(self._everyone, values)
        return list(values.tolist())

    def sum_in_host_(self, flat: Tensor) -> None:
        if self._inner is not None:
            self._all_reduce(self._inner, flat)

    def _all_reduce(self, transport: _C.Transport, flat: Tensor) -> None:
        if transport.size == 1 or flat.numel() == 0:
            return
        self._run(transport, transport.all_reduce, flat)
        self.sent_bytes += 2 * flat.nbytes * (transport.size - 1) // transport.size

    def _run(self, transport: _C.Transport, start: Callable[..., None], *tensors: Tensor) -> None:
        with self._groups.operation():
            work = transport.make_work()
            start(*tensors, work)
            work.wait()

    # --- shards of a host ---

    def host_shard(self, numel: int) -> tuple[int, int]:
        """This rank's share of ``numel`` elements within its host, as [begin, end): equal lengths, may exceed it."""
        size = shard_numel(numel, self.places)
        return self.place * size, (self.place + 1) * size

    def sum_to_shards(self, flat: Tensor) -> Tensor:
        """This rank's part of the host's sum: fp32 [n] -> [n / places, rounded up]. One rank per host: ``flat``."""
        if self._inner is None:
            return flat
        begin, end = self.host_shard(flat.numel())
        whole = flat.new_zeros((end - begin) * self.places)
        whole[: flat.numel()] = flat
        shard = flat.new_empty(end - begin)
        self._run(self._inner, self._inner.reduce_scatter, shard, whole)
        self.sent_bytes += whole.nbytes * (self.places - 1) // self.places
        return shard

    def gather_shards(self, flat: Tensor, shard: Tensor) -> None:
        if self._inner is None:
            return
        whole = flat.new_empty(shard.numel() * self.places)
        self._run(self._inner, self._inner.all_gather, whole, shard)
        self.sent_bytes += shard.nbytes * (self.places - 1)
        flat.copy_(whole[: flat.numel()])

    # --- messages between hosts ---

    def gather(self, message: Tensor) -> Tensor:
        """Every member's message: uint8 [n] -> [members, n]."""
        messages = message.new_empty(self.members, message.numel())
        self._send(lambda: self._outer._allgather_base(messages.view(-1), message))
        self.sent_bytes += message.nbytes * (self.members - 1)
        return messages

    def swap(self, messages: Tensor) -> Tensor:
        """Row j goes to member j: uint8 [members, n] -> [members, n], row j from member j."""
        received = torch.empty_like(messages)
        self._send(lambda: self._outer.alltoall_base(received.view(-1), messages.view(-1), [], []))
        self.sent_bytes += messages.nbytes * (self.members - 1) // self.members
        return received

    def _send(self, start: Callable[[], dist.Work]) -> None:
        with self._groups.operation():
            run_collective(start, self._outer, "an exchange of compressed values")


def _take_groups(process_group: dist.ProcessGroup, purpose: _Purpose) -> _Groups:
    """Groups that no exchange of any rank has any more, or new ones. Collective."""
    made = _made.setdefault(process_group, [])
    free = [
        [number, groups.done]
        for number, groups in enumerate(made)
        if groups.is_free and groups.begun == groups.done and groups.purpose == purpose
    ]
    by_rank = GroupExchange(process_group).gather(free)
    for number, done in free:
        if all([number, done] in of_rank for of_rank in by_rank):
            made[number].is_free = False
            return made[number]
    made.append(_make_groups(process_group, purpose))
    return made[-1]


def _make_groups(process_group: dist.ProcessGroup, purpose: _Purpose) -> _Groups:
    """For exact sums, and for the shards of ranks in the same place on each host: see Note [Hosts]."""
    device, hierarchical, timeout = purpose
    ranks = dist.get_process_group_ranks(process_group)
    align_group_counts(process_group)
    own = new_group(ranks, device, timeout)
    everyone = select.open_transport("auto", own, device=device, timeout=timeout)
    hosts = _hosts_to_sum_in(own, hierarchical)
    if not hosts:
        return _Groups(everyone, own, purpose=purpose)
    mine = next(host for host in hosts if own.rank() in host)
    place = mine.index(own.rank())
    inner_group = new_group([ranks[rank] for rank in mine], device, timeout)
    outer = new_group([ranks[host[place]] for host in hosts], device, timeout)
    inner = select.open_transport("auto", inner_group, device=device, timeout=timeout)
    return _Groups(everyone, outer, inner, purpose)


def shard_numel(numel: int, count: int) -> int:
    """The length of each of ``count`` equal shards that cover ``numel`` elements."""
    alignment = _ALIGNMENT if numel >= 8 * count * _ALIGNMENT else _SMALL_ALIGNMENT
    return -(-numel // (count * alignment)) * alignment


def new_group(ranks: list[int], device: torch.device, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A process group of these ranks of the default group, for tensors on ``device``.

    Collective among them, after `align_group_counts`.
    """
    backend = "gloo" if device.type == "cpu" else None
    return _torch.new_local_group(sorted(ranks), timeout=timeout, backend=backend)


def _hosts_to_sum_in(group: dist.ProcessGroup, hierarchical: Hierarchical) -> list[list[int]]:
    """The ranks of each host, by their rank in the group; empty if every rank counts as a host."""
    if hierarchical not in (True, False, "auto"):
        raise ValueError(f"hierarchical must be True, False or 'auto', got {hierarchical!r}")
    if hierarchical is False:
        return []
    hosts = ranks_of_hosts(GroupExchange(group))
    sizes = [len(host) for host in hosts]
    if max(sizes) == 1 or (hierarchical == "auto" and len(hosts) == 1):
        return []
    if len(set(sizes)) > 1:
        if is_first_in_job("hosts have unequal ranks", group):
            logger.warning(
                "hosts have different numbers of ranks (%s), so compressed gradients are exchanged between all ranks",
                " and ".join(map(str, sizes)),
            )
        return []
    return hosts


# --- sums whose summands are sent compressed ---


def sum_over_ranks(exchange: Exchange, flat: Tensor, format: str, scale: float) -> None:
    """In place: the sum of ``flat * scale`` over all ranks, fp32 [n], sent in ``format``; the same bits on each."""
    shard = exchange.sum_to_shards(flat)
    sum_compressed(exchange, format, shard, scale)
    exchange.gather_shards(flat, shard)


def sum_compressed(
    exchange: Exchange,
    format: str,
    flat: Tensor,
    scale: float = 1.0,
    residual: Tensor | None = None,
    server_residual: Tensor | None = None,
) -> None:
    """In place: the sum over the exchange's members of ``flat * scale``, sent in ``format``; the same bits on each.

    Two members send each other everything and add in rank order. More members send shards to their owners, which sum
    them in fp32 and send the sum to all, compressed again (with a residual at the owner, as in double squeeze, Tang et
    al., ICML 2019).

    ``flat``: fp32 [n], contiguous. ``residual``: fp32 [n]; ``server_residual``: fp32 of this member's shard
    (:func:`server_shard`); None: no error feedback.
    """
    if exchange.members == 1:
        flat.mul_(scale)
        return
    if exchange.members == 2:
        size = _C.compressed_bytes(format, flat.numel())
        message = _messages(flat, size, 1)[0]
        formats.compress(format, flat, message[:size], residual, scale)
        for index, theirs in enumerate(exchange.gather(message).unbind()):
            formats.decompress(format, theirs[:size], flat, index > 0)
        return
    shards = _shards(flat.numel(), exchange.members)
    sizes = [_C.compressed_bytes(format, end - begin) for begin, end in shards]
    messages = _messages(flat, sizes[0], exchange.members)
    for (begin, end), size, message in zip(shards, sizes, messages.unbind(), strict=True):
        part = None if residual is None else residual[begin:end]
        formats.compress(format, flat[begin:end], message[:size], part, scale)
    begin, end = shards[exchange.member]
    size = sizes[exchange.member]
    total = flat[begin:end]
    for index, message in enumerate(exchange.swap(messages).unbind()):
        formats.decompress(format, message[:size], total, index > 0)
    answer = messages[0]
    formats.compress(format, total, answer[:size], server_residual, 1.0)
    for (begin, end), size, message in zip(shards, sizes, exchange.gather(answer).unbind(), strict=True):
        formats.decompress(format, message[:size], flat[begin:end])


def server_shard(exchange: Exchange, numel: int) -> tuple[int, int]:
    """The part of ``numel`` elements that this member, of more than two, sums, as [begin, end)."""
    return _shards(numel, exchange.members)[exchange.member]


def _shards(numel: int, members: int) -> list[tuple[int, int]]:
    size = shard_numel(numel, members)
    return [(min(i * size, numel), min((i + 1) * size, numel)) for i in range(members)]


def _messages(flat: Tensor, size: int, count: int) -> Tensor:
    """uint8 [count, size, rounded up to 4]: each row begins with fp32 scales, which must be aligned."""
    return torch.empty(count, -(-size // 4) * 4, dtype=torch.uint8, device=flat.device)
