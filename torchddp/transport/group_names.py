"""Names of process groups, which torch gives by how many groups a rank has."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from torchddp.transport.object_exchange import gather_objects

__all__ = ["even_out"]


def even_out(process_group: Any) -> None:
    """Collective: from now on groups that these ranks make by themselves have the same name on all of them.

    ``new_group(use_local_synchronization=True)`` names a group by its ranks and by how many groups the rank has. Ranks
    that have come from elsewhere have made fewer or more than the others, would wait under another name, and time out.
    Those with fewer make groups of their own rank alone.
    """
    counts = gather_objects(len(_world.pg_names), process_group)
    for _ in range(max(counts) - counts[process_group.rank()]):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
