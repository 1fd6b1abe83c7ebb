"""Memory shared by the ranks of a host: how they connect to it, and its use as a torch.distributed backend.

    import torchddp
    torch.distributed.init_process_group("torchddp_shm")  # or "cpu:torchddp_shm,cuda:nccl"

The backend takes CPU tensors, for ranks of one host. What shared memory has no way for (messages, all-to-all, gather,
scatter, products) goes to a gloo backend of the same ranks. An error or timeout in shared memory fails the whole group.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from torchddp import _C, _torch
from torchddp.transport.agreement import GroupExchange, Peer, StoreExchange, align_group_counts, connect_all, ranks_by
from torchddp.transport.store import begin_life

BACKEND_NAME = "torchddp_shm"
LIMIT_ENV = "TORCHDDP_SHM_LIMIT_MB"
# Ranks reach this point within milliseconds of each other, because it follows a collective.
_CONNECT_TIMEOUT = datetime.timedelta(seconds=20)
_outer_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup | None] = weakref.WeakKeyDictionary()
# By host, which a test may change.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, _C.ShmMeeting]] = weakref.WeakKeyDictionary()


def limit_bytes() -> int:
    """The per-rank limit set by TORCHDDP_SHM_LIMIT_MB; 0: no limit. ValueError if it is not a positive number."""
    text = os.environ.get(LIMIT_ENV, "")
    if not text:
        return 0
    try:
        limit_mb = float(text)
    except ValueError:
        limit_mb = -1.0
    if not 0 < limit_mb < float("inf"):
        raise ValueError(f"{LIMIT_ENV} must be a positive number of MiB, got {text!r}")
    return max(1, int(min(limit_mb * 2**20, 2.0**60)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShmPeer(Peer):
    user: int
    host: str = ""
    address: str = ""
    offer: Sequence[Any] = ()  # in memory that the group's ranks share already: Note [Channels] in csrc/shm/mesh.h


def connect(
    exchange: GroupExchange | StoreExchange,
    timeout: datetime.timedelta,
    process_group: dist.ProcessGroup | None = None,
    outer_timeout: datetime.timedelta | None = None,
) -> _C.ShmTransport | str:
    """Collective. Return a transport on every rank, or the same reason for failure on every rank.

    ``timeout``: of an operation. ``process_group``: that of the ranks; None: they must share a host.
    ``outer_timeout``: of what is sent between hosts.
    """
    endpoint, own = None, ShmPeer(user=os.geteuid())
    try:
        host, meeting = _C.host_identity(), None
        if process_group is not None:
            meeting = _meetings.setdefault(process_group, {}).setdefault(host, _C.ShmMeeting())
        endpoint = _C.ShmEndpoint(limit_bytes(), meeting)
        own = dataclasses.replace(own, host=host, address=endpoint.address, offer=endpoint.offer)
    except (RuntimeError, ValueError) as error:
        own = dataclasses.replace(own, problem=str(error))

    def join(peers: Sequence[ShmPeer]) -> _C.ShmTransport:
        nonlocal endpoint
        socket, endpoint = endpoint, None  # destroyed on return, so that no rank waits at it
        assert socket is not None
        hosts = list(ranks_by(peer.host for peer in peers).values())
        mine = next(ranks for ranks in hosts if exchange.rank in ranks)
        columns = _columns(process_group, hosts)
        places = {rank: place for ranks in hosts for place, rank in enumerate(ranks)}
        outer_ranks = {rank: index for column in columns for index, rank in enumerate(column)}
        return socket.connect(
            process_group,
            local_ranks=mine,
            addresses=[peers[rank].address for rank in mine],
            outer_group=None if process_group is None else _outer_group(process_group, columns, outer_timeout),
            places=[places[rank] for rank in range(exchange.size)],
            outer_ranks=[outer_ranks.get(rank, -1) for rank in range(exchange.size)],  # -1: its place owns nothing
            owners=min(map(len, hosts)),
            spans=len(hosts) > 1,
            connect_timeout=_CONNECT_TIMEOUT,
            timeout=timeout,
            offers=[tuple(peers[rank].offer) for rank in mine],
        )

    return connect_all(exchange, own, partial(_reason_against, may_span_hosts=process_group is not None), join)


def _reason_against(peers: Sequence[ShmPeer], *, may_span_hosts: bool) -> str:
    """Why these ranks can't share memory, the same on all of them; or empty."""
    by_user = ranks_by(peer.user for peer in peers)
    if len(by_user) > 1:
        (user, _), (other, ranks) = list(by_user.items())[:2]
        return f"rank 0 runs as user {user}, rank {ranks[0]} as user {other}"
    hosts = list(ranks_by(peer.host for peer in peers).values())
    if len(hosts) > 1 and not may_span_hosts:
        return (
            f"rank {hosts[1][0]} is on a different host from rank {hosts[0][0]}, or can't see its processes "
            "(containers, network namespaces); use gloo between hosts"
        )
    if len(hosts) > 1 and max(map(len, hosts)) == 1:
        return "no two ranks are on the same host"
    return ""


def _columns(process_group: dist.ProcessGroup | None, hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks that reduce the same shard of every bucket between hosts: those in the same place on each."""
    if process_group is None or len(hosts) == 1:
        return []
    as_new_group_sorts = partial(dist.get_global_rank, process_group)
    return [sorted(column, key=as_new_group_sorts) for column in zip(*hosts, strict=False)]


def _outer_group(
    process_group: dist.ProcessGroup, columns: Sequence[Sequence[int]], timeout: datetime.timedelta | None
) -> dist.ProcessGroup | None:
    """The ranks in this rank's place on each host, or None if its place owns no shard. Cached per process group.

    A rank without such a group makes one of its own: names of later groups depend on how many a rank has.
    """
    if not columns:
        return None
    if process_group not in _outer_groups:
        own = next((column for column in columns if process_group.rank() in column), ())
        ranks = [dist.get_global_rank(process_group, rank) for rank in own] or [dist.get_rank()]
        align_group_counts(process_group)
        group = _torch.new_local_group(ranks, backend="gloo", timeout=timeout)
        _outer_groups[process_group] = group if own else None
    return _outer_groups[process_group]


def register() -> None:
    """Register the backend's name with ``init_process_group`` and ``new_group``. Idempotent."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, devices=["cpu"])
        _torch.replace_backend_plugins(_Plugins)


class _Plugins(dict[str, Any]):
    """torch's table of external backends, without ours when listed: if it isn't empty, "cpu:gloo" sets no default."""

    def keys(self) -> Any:
        return {name: None for name in self if name != BACKEND_NAME.upper()}.keys()


def _create(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> _torch.Backend:
    """Called by torch for each process group. Collective."""
    # The store may be reused by the next process group of this name, and gloo leaves its keys there.
    store = dist.PrefixStore(begin_life(store, BACKEND_NAME, rank), store)
    exchange = StoreExchange(store, rank, size, timeout, f"the {BACKEND_NAME} backend")
    transport = connect(exchange, timeout)
    exchange.close()
    if isinstance(transport, str):
        raise RuntimeError(f"rank {rank}: the {BACKEND_NAME} backend can't share memory here: {transport}")
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return _C.make_shm_backend(transport, gloo, timeout)
