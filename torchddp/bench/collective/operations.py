"""Single collectives: their bandwidths, and checks of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from torchddp.bench.collective.companion import first_difference

ITEM_BYTES = 4  # fp32
# 64 B to 64 MB, in factors of four.
SIZES_BYTES = tuple(64 * 4**step for step in range(11))
QUICK_SIZES_BYTES = tuple(64 * 4**step for step in (2, 5, 9))
# Far above any L2 cache, so that memory bandwidth is the limit.
ROOFLINE_MIN_BYTES = 16 * 1024**2
# A prime, so that a misplaced block of 2^n elements shows. Sums over 64 ranks are exact in fp32.
PERIOD = 251


@dataclass(frozen=True)
class Operation:
    """A collective. Its message is the whole buffer; a shard is one rank's part of it."""

    name: str
    # Whether the input or the output is a shard.
    sharded: bool
    # busbw / algbw by world size, as defined by nccl-tests: busbw is comparable across numbers of ranks.
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
    """The number of elements of a message of about this size that can be split into equal shards."""
    return max(size_bytes // ITEM_BYTES // world_size, 1) * world_size


def size_text(size_bytes: int) -> str:
    """'1 KB', '256 MB', in powers of 1024, as is usual for message sizes."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    if round(size_bytes / 1024) < 1024:
        return f"{size_bytes / 1024:.3g} KB"
    return f"{size_bytes / 1024**2:.3g} MB"


def algbw_gb_per_s(size_bytes: int, time_us: float) -> float:
    return size_bytes / time_us / 1e3


def busbw_gb_per_s(operation: Operation, size_bytes: int, time_us: float, world_size: int) -> float:
    """The bus bandwidth, which can be compared with the hardware's."""
    return algbw_gb_per_s(size_bytes, time_us) * operation.bus_factor(world_size)


def has_roofline(operation: Operation, size_bytes: int, world_size: int) -> bool:
    """Whether `roofline_us` applies: to large all-reduces of two or more ranks."""
    return operation.name == "all_reduce" and size_bytes >= ROOFLINE_MIN_BYTES and world_size > 1


def streamed_gb_per_s(size_bytes: int, copy_us_by_rank: list[float]) -> float:
    """The total memory bandwidth of all ranks, each of which reads and writes one message in its time."""
    return sum(2 * size_bytes / copy_us / 1e3 for copy_us in copy_us_by_rank)


def roofline_us(size_bytes: int, world_size: int, memory_gb_per_s: float) -> float:
    """The minimum time of an all-reduce of B bytes in shared memory.

    Each of n ranks reads its n-th part of n buffers and writes it to n buffers: 2 B per rank, 2 n B in total.
    """
    return 2 * world_size * size_bytes / memory_gb_per_s / 1e3


def broadcast_root(world_size: int) -> int:
    """Not rank 0, whose times are reported, so that they include the arrival of the data."""
    return world_size - 1


# --- checks of results -----------------------------------------------------------------------------------------------


class WrongResultError(RuntimeError):
    """An implementation computed a wrong result, so its time is meaningless."""


def period(rank: int) -> Tensor:
    """The period of one rank's input."""
    # A different multiple per rank, so that adding one rank's values twice and another's not at all shows.
    return (torch.arange(PERIOD) * (rank + 1) % PERIOD).float()


def total_period(world_size: int) -> Tensor:
    """The period of the sum over ranks. It has whole numbers, so the order of the sum does not matter."""
    return torch.stack([period(source) for source in range(world_size)]).sum(0)


def _tiled(period: Tensor, numel: int) -> Tensor:
    return period.repeat(-(-numel // PERIOD))[:numel]


@lru_cache(maxsize=1)
def stamp(rank: int, numel: int) -> Tensor:
    """The input of one rank. Do not write to it: implementations share it and copy their inputs from it."""
    return _tiled(period(rank), numel)


def expected(operation: str, rank: int, world_size: int, numel: int) -> Tensor:
    """The output of one rank for stamped inputs; `numel` counts the whole message."""
    shard = numel // world_size
    if operation == "broadcast":
        return _tiled(period(broadcast_root(world_size)), numel)
    if operation == "all_gather":
        return torch.cat([_tiled(period(source), shard) for source in range(world_size)])
    total = _tiled(total_period(world_size), numel)
    return total[rank * shard : (rank + 1) * shard] if operation == "reduce_scatter" else total


@dataclass(frozen=True)
class Check:
    """Checks the result of one implementation's operation on one rank."""

    name: str
    operation: str
    rank: int
    world_size: int
    numel: int  # of the whole message

    def compare(self, target: Tensor) -> None:
        """Raise `WrongResultError` if this is not the rank's right output for stamped inputs."""
        right = expected(self.operation, self.rank, self.world_size, self.numel)
        self.refuse(first_difference(target.numpy(), right.numpy()), target.numel())

    def refuse(self, difference: tuple[int, int, float] | None, numel: int) -> None:
        """Raise `WrongResultError` if `first_difference` found one in an output of `numel` elements."""
        if difference is not None:
            wrong, index, value = difference
            raise WrongResultError(
                f"{self.operation} of '{self.name}' on rank {self.rank}, {self.numel} elements: {wrong} of {numel} are "
                f"wrong, the first at index {index} with value {value!r}"
            )
