"""Which rank owns which parameter, and which parameters are sent together."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


def partition(
    numels: Sequence[int],
    devices: Sequence[Hashable],
    world_size: int,
    owners: Sequence[int | None] | None = None,
    wanted: Sequence[bool] | None = None,
) -> list[int | None]:
    """The owner of each parameter, balanced by number of elements per device.

    Greedy: the largest parameter first, to the rank with the fewest elements on its device; ties go to the lower index
    and rank. Parameters that already have an owner (``owners``) keep it and count; those that are not ``wanted`` get
    none. Pure: the same lists give the same answer on every rank.
    """
    count = len(numels)
    found: list[int | None] = list(owners) if owners is not None else [None] * count
    wanted = wanted if wanted is not None else [True] * count
    if not len(devices) == len(found) == len(wanted) == count:
        raise ValueError(f"the lists differ in length: {count}, {len(devices)}, {len(found)}, {len(wanted)}")
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

    def plan(self, wanted: Sequence[bool]) -> list[int | None]:
        """Assign owners to wanted parameters that have none; all others keep theirs. Changes nothing."""
        known = [*self.owners, *[None] * (len(self.params) - len(self.owners))]
        numels = [param.numel() for param in self.params]
        return partition(numels, self._device_numbers(), self.world_size, known, wanted)

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
            for name, p, device in zip(self.names, self.params, self._device_numbers(), strict=True)
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

    def _device_numbers(self) -> list[int]:
        """Devices numbered by first appearance, because each rank has the same parameter on a different GPU."""
        order = {device: number for number, device in enumerate(dict.fromkeys(p.device for p in self.params))}
        return [order[param.device] for param in self.params]
