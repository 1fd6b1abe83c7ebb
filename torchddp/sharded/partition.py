"""Which rank owns which parameter, and which parameters are sent together."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

# The search for the least capacity ends after so many steps, or where the highest cost is that close to a lower bound.
_SEARCHES = 12
_EQUAL = 1.01


@dataclass(frozen=True)
class Share:
    """What a rank of an `OSS` owns.

    Attributes:
        rank: the rank in the optimizer's group.
        cost: of the rank's updates, in the units of the optimizer's ``cost``.
        elements, bytes: of the parameters that it owns.
    """

    rank: int
    cost: float
    elements: int
    bytes: int


def partition(
    costs: Sequence[float],
    devices: Sequence[Hashable],
    world_size: int,
    owners: Sequence[int | None] | None = None,
    wanted: Sequence[bool] | None = None,
    sizes: Sequence[int] | None = None,
) -> list[int | None]:
    """The owner of each parameter, balanced by cost per device, and as far as that allows by size.

    Parameters that already have an owner (``owners``) keep it and count; those that are not ``wanted`` get none. Pure:
    the same lists give the same answer on every rank. See `assign` and `even_out`.
    """
    count = len(costs)
    found: list[int | None] = list(owners) if owners is not None else [None] * count
    wanted = wanted if wanted is not None else [True] * count
    sizes = sizes if sizes is not None else [0] * count
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    for device in dict.fromkeys(devices):
        here = [index for index in range(count) if devices[index] == device]
        loads, held = [0.0] * world_size, [0] * world_size
        for index in here:
            owner = found[index]
            if owner is not None:
                loads[owner] += costs[index]
                held[owner] += sizes[index]
        new = sorted((i for i in here if found[i] is None and wanted[i]), key=lambda i: (-costs[i], i))
        chosen = assign([costs[index] for index in new], loads)
        even_out(chosen, [costs[index] for index in new], [sizes[index] for index in new], loads, held)
        for index, rank in zip(new, chosen, strict=True):
            found[index] = rank
    return found


def assign(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """A rank for each of these costs, the largest first, on top of what the ranks have.

    Each goes to the rank that has least (ties: the lower one). If the ranks then differ, the least capacity is searched
    for into which all fit, each on the first rank that has room (MULTIFIT, Coffman, Garey and Johnson 1978).
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    best = []
    for cost in costs:
        load, rank = heap[0]
        best.append(rank)
        heapq.heapreplace(heap, (load + cost, rank))
    highest = max(load for load, _ in heap)
    lowest = max(sum(costs, sum(loads)) / len(loads), *loads, *costs[:1])
    for _ in range(_SEARCHES):
        if highest <= lowest * _EQUAL:
            break
        capacity = (lowest + highest) / 2
        fitted = _first_fit(costs, loads, capacity)
        if fitted is None:
            lowest = capacity
        else:
            best, highest = fitted, capacity
    return best


def _first_fit(costs: Sequence[float], loads: Sequence[float], capacity: float) -> list[int] | None:
    room = [capacity - load for load in loads]
    found = []
    for cost in costs:
        rank = next((rank for rank, left in enumerate(room) if cost <= left), None)
        if rank is None:
            return None
        room[rank] -= cost
        found.append(rank)
    return found


def even_out(
    owners: list[int], costs: Sequence[float], sizes: Sequence[int], loads: Sequence[float], held: Sequence[int]
) -> None:
    """Move parameters from the rank with most bytes to the one with fewest, as long as the highest cost stays."""
    loads, held = list(loads), list(held)
    for owner, cost, size in zip(owners, costs, sizes, strict=True):
        loads[owner] += cost
        held[owner] += size
    limit = max(loads) if loads else 0.0
    by_size = sorted(range(len(owners)), key=lambda i: (-sizes[i], i))
    for _ in owners:
        most, least = held.index(max(held)), held.index(min(held))
        moved = next(
            (
                i
                for i in by_size
                if owners[i] == most and 0 < sizes[i] < held[most] - held[least] and loads[least] + costs[i] <= limit
            ),
            None,
        )
        if moved is None:
            return
        owners[moved] = least
        for rank, sign in ((most, -1), (least, 1)):
            loads[rank] += sign * costs[moved]
            held[rank] += sign * sizes[moved]


def in_rounds(owners: Sequence[int]) -> list[int]:
    """The order in which messages travel while their owners update: the first of each owner, then the second ... Pure.

    ``owners``: of the messages. Returns their indices.
    """
    counts: dict[int, int] = {}
    rounds = []
    for owner in owners:
        counts[owner] = counts.get(owner, 0) + 1
        rounds.append(counts[owner])
    return sorted(range(len(owners)), key=lambda index: (rounds[index], index))


def pack(keys: Sequence[Key | None], sizes: Sequence[int], limit: float) -> list[tuple[Key, list[int]]]:
    """Pack indices into bins, each of one key and at most ``limit`` in total size; a larger one is alone. Pure.

    Bins come with their key, ordered by their first index; an index whose key is None is in no bin.
    """
    bins: list[tuple[Key, list[int]]] = []
    newest: dict[Key, list[int]] = {}
    room: dict[Key, float] = {}
    for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        if key is None:
            continue
        if key not in newest or size > room[key]:
            newest[key], room[key] = [], limit
            bins.append((key, newest[key]))
        newest[key].append(index)
        room[key] -= size
    return bins


class ParameterPartition:
    """The parameters of an optimizer's groups by index: their names in messages, and their owners.

    ``owners[index]`` is a rank of the group, or None for a parameter that was never trainable. ``active[index]`` says
    whether it takes part in steps: frozen ones keep their owner but don't.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.params: list[torch.Tensor] = []
        self.names: list[str] = []
        self.costs: list[float] = []  # of updating each
        self.owners: list[int | None] = []
        self.owner_of: dict[torch.Tensor, int] = {}
        self.active: list[bool] = []

    def set_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """List the parameters in the order of the groups. Raises ValueError, changing nothing, for one given twice."""
        params: list[torch.Tensor] = []
        names: list[str] = []
        for number, group in enumerate(param_groups):
            given = group.get("param_names")
            for place, param in enumerate(group["params"]):
                where = f"parameter {place} of group {number}"
                names.append(f"{where} ('{given[place]}')" if given else where)
                params.append(param)
        if len(set(params)) != len(params):
            twice = next(index for index, param in enumerate(params) if param in set(params[:index]))
            raise ValueError(f"{names[twice]} is given twice")
        self.params, self.names = params, names

    def plan(self, wanted: Sequence[bool], others: Sequence[ParameterPartition] = ()) -> list[int | None]:
        """Assign owners to wanted parameters that have none; all others keep theirs. Changes nothing.

        ``others``: their owners' loads count, too.
        """
        known = [*self.owners, *[None] * (len(self.params) - len(self.owners))]
        return plan_together(
            [self, *others],
            [known, *(other.owners for other in others)],
            [wanted, *([False] * len(other.params) for other in others)],
        )[0]

    def shares(self) -> list[Share]:
        """What each rank owns."""
        owned = [[i for i, owner in enumerate(self.owners) if owner == rank] for rank in range(self.world_size)]
        return [
            Share(
                rank,
                sum(self.costs[index] for index in mine),
                sum(self.params[index].numel() for index in mine),
                sum(self.params[index].nbytes for index in mine),
            )
            for rank, mine in enumerate(owned)
        ]

    def assign(self, owners: list[int | None], active: list[bool]) -> bool:
        changed = (owners, active) != (self.owners, self.active)
        self.owners, self.active = owners, active
        self.owner_of = {p: rank for p, rank in zip(self.params, owners, strict=True) if rank is not None}
        return changed

    def trainable(self) -> list[bool]:
        return [param.requires_grad for param in self.params]

    def owned(self) -> list[int]:
        return [index for index, owner in enumerate(self.owners) if owner == self.rank]

    def describe(self) -> list[str]:
        return [
            f"{name}: {str(p.dtype).removeprefix('torch.')}{list(p.shape)} on {p.device.type} device {device}, "
            f"{'trainable' if p.requires_grad else 'frozen'}"
            for name, p, device in zip(self.names, self.params, device_numbers(self.params), strict=True)
        ]

    def check_gradients(self) -> None:
        """Raises RuntimeError for a sparse gradient, or that of a parameter thawed without `refresh_trainable`."""
        for index, param in enumerate(self.params):
            if param.grad is None:
                continue
            if param.grad.layout != torch.strided:
                raise RuntimeError(f"OSS does not support sparse gradients, and that of {self.names[index]} is sparse")
            if param.requires_grad and not self.active[index]:
                raise RuntimeError(
                    f"{self.names[index]} has a gradient, but was frozen when owners were assigned: call "
                    "refresh_trainable() on all ranks after thawing parameters"
                )

    @contextmanager
    def frozen_gradients_hidden(self) -> Iterator[None]:
        """A context without the gradients left on this rank's frozen parameters, which optimizers apply otherwise."""
        hidden = [(p, p.grad) for p in (self.params[i] for i in self.owned() if not self.active[i])]
        for param, _ in hidden:
            param.grad = None
        try:
            yield
        finally:
            for param, grad in hidden:
                param.grad = grad


def plan_together(
    parts: Sequence[ParameterPartition], known: Sequence[Sequence[int | None]], wanted: Sequence[Sequence[bool]]
) -> list[list[int | None]]:
    """The owners of several optimizers' parameters, balanced over all of them; see `partition`. Changes nothing."""
    params = [param for part in parts for param in part.params]
    owners = iter(
        partition(
            [cost for part in parts for cost in part.costs],
            device_numbers(params),
            parts[0].world_size,
            [owner for own in known for owner in own],
            [want for own in wanted for want in own],
            [param.nbytes for param in params],
        )
    )
    return [list(islice(owners, len(part.params))) for part in parts]


def device_numbers(params: Sequence[torch.Tensor]) -> list[int]:
    """Devices numbered by first appearance, because each rank has the same parameter on a different GPU."""
    order = {device: number for number, device in enumerate(dict.fromkeys(p.device for p in params))}
    return [order[param.device] for param in params]
