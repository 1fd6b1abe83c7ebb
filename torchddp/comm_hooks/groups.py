"""The process groups that compressors send over: their own, so that nothing else is sent in between.

Note [Hosts]
~~~~~~~~~~~~
With several hosts, the ranks of one first sum exactly in the memory they share; each then owns a shard of the bucket,
and only that is compressed and sent to the ranks in its place on the other hosts. What is lost to rounding is then
lost once a host, not once a rank, and a byte crosses the link once. On one host every rank counts as a host, or
nothing would be compressed.
"""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from torchddp import _C
from torchddp.transport import select
from torchddp.transport.agreement import GroupExchange, align_group_counts, ranks_by

__all__ = ["Groups", "make_groups", "new_group"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Groups:
    """Who sends what to whom.

    Attributes:
        everyone: exact sums over all ranks.
        inner: the ranks of this host; None where every rank counts as a host.
        outer: the ranks in this one's place on each host, which exchange compressed shards.
        is_shared: the process group itself, over which others send too.
        time_limit: of each operation; None: unknown.
    """

    everyone: _C.Transport
    inner: _C.Transport | None
    outer: Any
    is_shared: bool = False
    time_limit: datetime.timedelta | None = None


def make_groups(
    process_group: Any, device: torch.device, hierarchical: bool | str, timeout: datetime.timedelta | None
) -> Groups:
    """Collective. ``hierarchical``: "auto", True or False; see Note [Hosts]."""
    if process_group not in _world.pg_map:
        # torch can make no group of its ranks (torchft's): nobody else may send over it during backward.
        return Groups(_C.C10dTransport(process_group), None, process_group, is_shared=True, time_limit=timeout)
    timeout = timeout or select.group_timeout(process_group, device.type)
    ranks = dist.get_process_group_ranks(process_group)
    align_group_counts(process_group)
    own = new_group(ranks, device, timeout)
    everyone = select.open_transport("auto", own, device=device, timeout=timeout)
    hosts = _hosts_to_sum_in(own, hierarchical)
    if not hosts:
        return Groups(everyone, None, own, time_limit=timeout)
    mine = next(host for host in hosts if own.rank() in host)
    place = mine.index(own.rank())
    inner_group = new_group([ranks[rank] for rank in mine], device, timeout, among_them=True)
    outer = new_group([ranks[host[place]] for host in hosts], device, timeout, among_them=True)
    inner = select.open_transport("auto", inner_group, device=device, timeout=timeout)
    return Groups(everyone, inner, outer, time_limit=timeout)


def new_group(ranks: list[int], device: torch.device, timeout: datetime.timedelta, among_them: bool = False) -> Any:
    """A process group of these ranks of the default group, for tensors on ``device``. Collective among them."""
    # Locally synchronised groups are named by how many groups a rank has; with all ranks that is not needed.
    among_them = among_them or len(ranks) < dist.get_world_size()
    backend = "gloo" if device.type == "cpu" else None
    return dist.new_group(sorted(ranks), timeout=timeout, backend=backend, use_local_synchronization=among_them)


def _hosts_to_sum_in(group: Any, hierarchical: bool | str) -> list[list[int]]:
    """The ranks of each host, by their rank in the group; empty if every rank counts as a host."""
    if hierarchical not in (True, False, "auto"):
        raise ValueError(f"hierarchical must be True, False or 'auto', got {hierarchical!r}")
    if hierarchical is False:
        return []
    hosts = list(ranks_by(GroupExchange(group).gather(_C.host_identity())).values())
    sizes = [len(host) for host in hosts]
    if max(sizes) == 1 or (hierarchical == "auto" and len(hosts) == 1):
        return []
    if len(set(sizes)) > 1:
        if group.rank() == 0:
            logger.warning(
                "compressed gradients go from rank to rank, not from host to host: the hosts have %s ranks",
                " and ".join(map(str, sizes)),
            )
        return []
    return hosts
