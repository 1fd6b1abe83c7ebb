"""Which rank owns which parameter. Pure: the same lists give the same answer on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence


def partition(
    numels: Sequence[int],
    devices: Sequence[Hashable],
    world_size: int,
    owners: Sequence[int | None] | None = None,
    wanted: Sequence[bool] | None = None,
) -> list[int | None]:
    """The owner of each parameter, balanced by number of elements on each device by itself.

    Greedy: the largest parameter first, to the rank with the fewest elements on its device; ties go to the lower index
    and the lower rank. The loads of two ranks on a device differ by its largest parameter at most. Parameters that
    have an owner (``owners``) keep it and count; those that are not ``wanted`` get none.
    """
    count = len(numels)
    found: list[int | None] = list(owners) if owners is not None else [None] * count
    wanted = wanted if wanted is not None else [True] * count
    if not len(devices) == len(found) == len(wanted) == count:
        raise ValueError(f"lists of one length are needed, got {count}, {len(devices)}, {len(found)}, {len(wanted)}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    for device in dict.fromkeys(devices):
        here = [index for index in range(count) if devices[index] == device]
        loads = [0] * world_size
        for index in here:
            owner = found[index]
            if owner is not None:
                loads[owner] += numels[index]
        heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(heap)
        new = [index for index in here if found[index] is None and wanted[index]]
        for index in sorted(new, key=lambda i: (-numels[i], i)):
            load, rank = heap[0]
            found[index] = rank
            heapq.heapreplace(heap, (load + numels[index], rank))
    return found
