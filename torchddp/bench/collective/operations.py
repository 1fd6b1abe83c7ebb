"""The collectives, the message sizes, and what a time says about bandwidth. Pure, imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ITEM_BYTES = 4  # fp32
# 1 KB to 256 MB, each four times the one before.
SIZES_BYTES = tuple(1024 * 4**step for step in range(10))
QUICK_SIZES_BYTES = tuple(1024 * 4**step for step in (0, 3, 7))
# Where memory bandwidth is the bound: far above any L2. Below it a roofline would be one of caches.
ROOFLINE_MIN_BYTES = 16 * 1024**2


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
    if size_bytes < 1024**2:
        return f"{size_bytes / 1024:.3g} KB"
    return f"{size_bytes / 1024**2:.3g} MB"


def algbw_gb_per_s(size_bytes: int, time_us: float) -> float:
    """Bytes of the message over the time."""
    return size_bytes / time_us / 1e3


def busbw_gb_per_s(operation: Operation, size_bytes: int, time_us: float, world_size: int) -> float:
    """The bandwidth to hold against the hardware's."""
    return algbw_gb_per_s(size_bytes, time_us) * operation.bus_factor(world_size)


def has_roofline(operation: Operation, size_bytes: int, world_size: int) -> bool:
    """Whether `roofline_us` says something about this operation at this size; one rank alone moves nothing."""
    return operation.name == "all_reduce" and size_bytes >= ROOFLINE_MIN_BYTES and world_size > 1


def streamed_gb_per_s(size_bytes: int, copy_us_by_rank: list[float]) -> float:
    """Memory bandwidth of all ranks together, each of which reads and writes a message in its time."""
    return sum(2 * size_bytes / copy_us / 1e3 for copy_us in copy_us_by_rank)


def roofline_us(size_bytes: int, world_size: int, memory_gb_per_s: float) -> float:
    """The least time of an all-reduce in shared memory.

    Each rank reads its n-th of n buffers and writes that n-th to n buffers: 2 B a rank, 2 n B in all.
    """
    return 2 * world_size * size_bytes / memory_gb_per_s / 1e3
