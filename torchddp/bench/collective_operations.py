"""Single collectives: what they move, who runs them, and that each computes the right thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torchddp._C import Transport

ITEM_BYTES = 4  # fp32
# 1 KB to 256 MB, each four times the one before.
SIZES_BYTES = tuple(1024 * 4**step for step in range(10))
QUICK_SIZES_BYTES = tuple(1024 * 4**step for step in (0, 3, 7))
# Where memory bandwidth is the bound: far above any L2. Below it a roofline would be one of caches.
ROOFLINE_MIN_BYTES = 16 * 1024**2
GLOO = "gloo"
SHM = "shm"
# The transports of ours, as `open_transport` knows them.
OURS = ("c10d", SHM)
# In the order of the table.
IMPLEMENTATIONS = (GLOO, *OURS)
# A prime: no block of a power of two in a wrong place goes unseen. Sums over 64 ranks are exact in fp32.
PERIOD = 251
Made = TypeVar("Made")


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


# --- who runs them ---------------------------------------------------------------------------------------------------


def open_transport(choice: str, group: Any) -> Transport:
    from torchddp.transport import select

    return select.open_transport(choice, group)


def broadcast_root(world_size: int) -> int:
    """Not rank 0, which holds the clock: what it times is the arrival of the data."""
    return world_size - 1


def _torch_collective(name: str, old_name: str) -> Callable[..., Any]:
    # torch 2.13 renamed two collectives; the old names still work, and warn in every call.
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, old_name)
    return found


class Gloo:
    """torch.distributed's functions on the process group, as a user calls them."""

    name = GLOO

    def allocate(self, numel: int) -> Tensor:
        """The memory this implementation likes best, flat fp32."""
        return torch.empty(numel)

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Callable[[], object]:
        """A function that runs the collective once and returns when its result may be used."""
        root = broadcast_root(dist.get_world_size())
        all_gather = _torch_collective("all_gather_single", "all_gather_into_tensor")
        reduce_scatter = _torch_collective("reduce_scatter_single", "reduce_scatter_tensor")
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(target),
            "broadcast": lambda: dist.broadcast(target, src=root),
            "all_gather": lambda: all_gather(target, source),
            "reduce_scatter": lambda: reduce_scatter(target, source),
        }
        return calls[operation]


class Ours:
    """A transport of torchddp, on memory that it allocated: where gradient buckets lie."""

    def __init__(self, choice: str) -> None:
        self.name = choice
        self._transport = open_transport(choice, dist.group.WORLD)

    def allocate(self, numel: int) -> Tensor:
        return self._transport.allocate(numel, torch.empty(0))

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Callable[[], object]:
        transport, work = self._transport, self._transport.make_work()
        root = broadcast_root(transport.size)
        starts: dict[str, Callable[[], None]] = {
            "all_reduce": lambda: transport.all_reduce(target, work),
            "broadcast": lambda: transport.broadcast(target, root, work),
            "all_gather": lambda: transport.all_gather(target, source, work),
            "reduce_scatter": lambda: transport.reduce_scatter(target, source, work),
        }
        start = starts[operation]

        def run() -> None:
            start()
            work.wait()

        return run


# One line of the table.
Implementation = Gloo | Ours


def attempt(make: Callable[[], Made]) -> tuple[Made | None, str | None]:
    """What `make` returns, or None and a reason on every rank if it raises on any of them."""
    made, reason = None, None
    try:
        made = make()
    except Exception as error:  # an extension that does not load, a transport that refuses, memory that is not there
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    agreed = next((found for found in reasons if found is not None), None)
    return (made, None) if agreed is None else (None, agreed)


def open_all() -> tuple[list[Implementation], dict[str, str]]:
    """Every implementation that opens on all ranks, and the reasons of the others."""
    opened: list[Implementation] = [Gloo()]
    reasons: dict[str, str] = {}
    for choice in OURS:
        ours, reason = attempt(lambda choice=choice: Ours(choice))  # type: ignore[misc]
        if ours is not None:
            opened.append(ours)
        else:
            reasons[choice] = str(reason)
    return opened, reasons


# --- that each computes the right thing ------------------------------------------------------------------------------


class WrongResultError(RuntimeError):
    """An implementation computed something else, so its time means nothing."""


def _period(rank: int) -> Tensor:
    # Another multiple on each rank: one rank's values twice instead of two ranks' once go seen too.
    return (torch.arange(PERIOD) * (rank + 1) % PERIOD).float()


def _tiled(period: Tensor, numel: int) -> Tensor:
    return period.repeat(-(-numel // PERIOD))[:numel]


def stamp(rank: int, numel: int) -> Tensor:
    """The input of one rank."""
    return _tiled(_period(rank), numel)


def expected(operation: str, rank: int, world_size: int, numel: int) -> Tensor:
    """The output of one rank for stamped inputs; `numel` is that of the whole message."""
    shard = numel // world_size
    if operation == "broadcast":
        return stamp(broadcast_root(world_size), numel)
    if operation == "all_gather":
        return torch.cat([stamp(source, shard) for source in range(world_size)])
    total = _tiled(torch.stack([_period(source) for source in range(world_size)]).sum(0), numel)
    return total[rank * shard : (rank + 1) * shard] if operation == "reduce_scatter" else total


def verify(name: str, operation: str, run: Callable[[], object], source: Tensor, target: Tensor) -> None:
    """Run once on stamped inputs; `WrongResultError` names what differs. Leaves zeros, which no sum makes grow."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    target.fill_(-1)
    source.copy_(stamp(rank, source.numel()))
    run()
    numel = max(source.numel(), target.numel())
    wrong = target.ne(expected(operation, rank, world_size, numel))
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise WrongResultError(
            f"{operation} of '{name}' on rank {rank}, {numel} elements: {int(wrong.sum())} of {target.numel()} are "
            f"wrong, the first at {index}, where it is {float(target[index])!r}"
        )
    source.zero_()
    target.zero_()
