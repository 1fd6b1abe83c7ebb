"""Steps of several microbatches that use different parameters, and the gradients they must give."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tests.models import Branches, Grads, batch, expected_grads, grads_of, loss_of, seeded
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


def assert_same(got: Grads, want: Grads, **tolerance: float) -> None:
    """Equal, and None in the same places."""
    assert got.keys() == want.keys()
    for name, grad in want.items():
        if grad is None:
            assert got[name] is None, f"{name}: got {got[name]}, nobody has a gradient"
        else:
            assert got[name] is not None, f"{name}: got None"
            torch.testing.assert_close(got[name], grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    """Collective: the gradients, bit for bit."""
    for name, grad in grads_of(model).items():
        present = torch.tensor([grad is not None])
        dist.broadcast(present, 0)
        assert bool(present) == (grad is not None), name
        if grad is not None:
            first = grad.clone()
            dist.broadcast(first, 0)
            assert torch.equal(grad, first), name
