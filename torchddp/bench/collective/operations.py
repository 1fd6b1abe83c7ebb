"""Single collectives: what they move, how much of it a second, and that each computes the right thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from torchddp.bench.collective.companion import first_difference

ITEM_BYTES = 4  # fp32
# 64 B to 64 MB, each four times the one before.
SIZES_BYTES = tuple(64 * 4**step for step in range(11))
QUICK_SIZES_BYTES = tuple(64 * 4**step for step in (2, 5, 9))
# Where memory bandwidth is the bound: far above any L2. Below it a roofline would be one of caches.
ROOFLINE_MIN_BYTES = 16 * 1024**2
# A prime: no block of a power of two in a wrong place goes unseen. Sums over 64 ranks are exact in fp32.
PERIOD = 251


@dataclass(frozen=True)
class Operation:
    """A collective on a message of B bytes, which is the whole buffer; a shard is one rank's part of it."""

    name: str
    # Whether one side of the operation is a shard.
    sharded: bool
    # World size -> busbw / algbw, as nccl-tests defines it: what one link carries, whatever the number of ranks.
    bus_factor: Callable[[int], float]


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", False, lambda ranks: 2 * (ranks - 1) / ranks),
        Operation("broadcast", False, lambda ranks: 1.0),
        Operation("all_gather", True, lambda ranks: (ranks - 1) / ranks),
        Operation("reduce_scatter", True, lambda ranks: (ranks - 1) / ranks),
    )
}


def whole_numel(size_bytes: int, world_size: int) -> int:
    """Elements of a message of about this size that splits into equal shards."""
    return max(size_bytes // ITEM_BYTES // world_size, 1) * world_size


def size_text(size_bytes: int) -> str:
    """'1 KB', '256 MB': powers of 1024, as sizes of messages are always counted."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    if round(size_bytes / 1024) < 1024:
        return f"{size_bytes / 1024:.3g} KB"
    return f"{size_bytes / 1024**2:.3g} MB"


def algbw_gb_per_s(size_bytes: int, time_us: float) -> float:
    return size_bytes / time_us / 1e3


def busbw_gb_per_s(operation: Operation, size_bytes: int, time_us: float, world_size: int) -> float:
    """The bandwidth to compare with the hardware's."""
    return algbw_gb_per_s(size_bytes, time_us) * operation.bus_factor(world_size)


def has_roofline(operation: Operation, size_bytes: int, world_size: int) -> bool:
    """Whether `roofline_us` applies to this operation at this size; one rank alone moves nothing."""
    return operation.name == "all_reduce" and size_bytes >= ROOFLINE_MIN_BYTES and world_size > 1


def streamed_gb_per_s(size_bytes: int, copy_us_by_rank: list[float]) -> float:
    """Memory bandwidth of all ranks together, each of which reads and writes a message in its time."""
    return sum(2 * size_bytes / copy_us / 1e3 for copy_us in copy_us_by_rank)


def roofline_us(size_bytes: int, world_size: int, memory_gb_per_s: float) -> float:
    """The least time of an all-reduce in shared memory.

    Each rank reads its n-th of n buffers and writes that n-th to n buffers: 2 B a rank, 2 n B in all.
    """
    return 2 * world_size * size_bytes / memory_gb_per_s / 1e3


def broadcast_root(world_size: int) -> int:
    """Not rank 0, which holds the clock: what it times is the arrival of the data."""
    return world_size - 1


# --- that each computes the right thing ------------------------------------------------------------------------------


class WrongResultError(RuntimeError):
    """An implementation computed something else, so its time means nothing."""


def period(rank: int) -> Tensor:
    """What the input of one rank repeats."""
    # Another multiple on each rank: one rank's values twice instead of two ranks' once go seen too.
    return (torch.arange(PERIOD) * (rank + 1) % PERIOD).float()


def total_period(world_size: int) -> Tensor:
    """What the sum over ranks repeats; of whole numbers, so the same in any order."""
    return torch.stack([period(source) for source in range(world_size)]).sum(0)


def _tiled(period: Tensor, numel: int) -> Tensor:
    return period.repeat(-(-numel // PERIOD))[:numel]


@lru_cache(maxsize=1)
def stamp(rank: int, numel: int) -> Tensor:
    """The input of one rank, to be read only: the implementations write theirs from the same memory."""
    return _tiled(period(rank), numel)


def expected(operation: str, rank: int, world_size: int, numel: int) -> Tensor:
    """The output of one rank for stamped inputs; `numel` is that of the whole message."""
    shard = numel // world_size
    if operation == "broadcast":
        return _tiled(period(broadcast_root(world_size)), numel)
    if operation == "all_gather":
        return torch.cat([_tiled(period(source), shard) for source in range(world_size)])
    total = _tiled(total_period(world_size), numel)
    return total[rank * shard : (rank + 1) * shard] if operation == "reduce_scatter" else total


@dataclass(frozen=True)
class Check:
    """Whose result of what is looked at, and on which rank."""

    name: str
    operation: str
    rank: int
    world_size: int
    numel: int  # of the whole message

    def compare(self, target: Tensor) -> None:
        """Raise `WrongResultError` if this rank's output of stamped inputs is another one."""
        right = expected(self.operation, self.rank, self.world_size, self.numel)
        self.refuse(first_difference(target.numpy(), right.numpy()), target.numel())

    def refuse(self, difference: tuple[int, int, float] | None, numel: int) -> None:
        """Raise `WrongResultError` for what `first_difference` found in an output of `numel` elements."""
        if difference is not None:
            wrong, index, value = difference
            raise WrongResultError(
                f"{self.operation} of '{self.name}' on rank {self.rank}, {self.numel} elements: {wrong} of {numel} are "
                f"wrong, the first at {index}, where it is {value!r}"
            )
