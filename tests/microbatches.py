"""Steps of several microbatches that use different parameters, and the gradients they must give."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn

from tests.models import Branches, Grads, batch, expected_grads, loss_of, seeded
from torchddp.sync import DDPSyncStrategy, accumulate

Usage = Sequence[Sequence[str]]  # by rank and microbatch: the branch of `Branches` it takes

SINGLE, MULTI, FORCED = DDPSyncStrategy

# Only in earlier microbatches; on one rank only; here first and there last.
USAGES: list[Usage] = [
    [["left", "left", "right"]] * 4,
    [["left", "left"], ["right", "left"], ["left", "left"], ["left", "right"]],
    [["left", "right"], ["right", "left"], ["right", "right"], ["left", "left"]],
]


_EXPECTED: dict[str, Grads] = {}


def make_branches() -> nn.Module:
    return seeded(Branches)


def backward(model: nn.Module, rank: int, micro: int, branch: str, step: int = 0) -> None:
    """Forward and backward of one microbatch."""
    loss_of(model(batch(rank, 10 * step + micro, 3, 4), branch)).backward()


def run_step(
    model: nn.Module, rank: int, usage: Usage, strategy: DDPSyncStrategy | str | None = None, step: int = 0
) -> None:
    """What a user writes, but for the optimizer."""
    for micro in accumulate(model, len(usage[rank]), strategy):
        backward(model, rank, micro, usage[rank][micro], step)


def expected(usage: Usage, world_size: int, step: int = 0) -> Grads:
    """The plain loop on one process: sums over microbatches, averages over ranks; None where nobody has a gradient."""
    key = repr((usage, world_size, step))
    if key not in _EXPECTED:

        def run(model: nn.Module, rank: int) -> None:
            for micro, branch in enumerate(usage[rank]):
                backward(model, rank, micro, branch, step)

        _EXPECTED[key] = expected_grads(make_branches(), run, world_size)
    return _EXPECTED[key]


def with_zeros(grads: Grads, model: nn.Module) -> Grads:
    """Zeros in the place of None, for parameters of `model`."""
    filled = copy.copy(grads)
    for name, parameter in model.named_parameters():
        if filled[name] is None:
            filled[name] = parameter.detach().new_zeros(parameter.shape)
    return filled
