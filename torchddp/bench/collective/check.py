"""That an implementation computes the right thing: stamped inputs, results with a closed form."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp.bench.collective.implementations import broadcast_root

# A prime: no block of a power of two in a wrong place goes unseen. Sums over 64 ranks are exact in fp32.
PERIOD = 251


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
