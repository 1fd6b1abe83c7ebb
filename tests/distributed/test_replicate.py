"""torchddp.replicate() trains as torchddp.DistributedDataParallel and torch's class do."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import run_ranks
from tests.models import Branches, Mlp, NormNet, batch, loss_of, seeded

pytestmark = pytest.mark.beyond_torch("has no replicate() with our engine")
SECONDS = 120.0


def train(model, rank, steps=4, optimizer=None, **options):
    """Gradients of the last step; the parameters have been updated in each."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(**options)
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()


def assert_same(model, reference, **tolerance):
    """Parameters and gradients, bit for bit unless told otherwise."""
    reference = getattr(reference, "module", reference)
    named = dict(reference.named_parameters())
    assert set(named) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for mine, theirs in ((parameter, named[name]), (parameter.grad, named[name].grad)):
            if theirs is None:
                assert mine is None, name
            else:
                torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}, {"transport": "c10d", "gradient_as_bucket_view": False}])
def test_same_bits_as_the_wrapper(world_size, options):
    def work(rank):
        model = seeded(Mlp)
        parameters = list(model.parameters())
        before = torchddp.finished_steps()
        assert torchddp.replicate(model, **options) is model
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        train(model, rank)
        assert torchddp.finished_steps() - before == 4
        wrapped = torchddp.DistributedDataParallel(seeded(Mlp), **options)
        train(wrapped, rank)
        assert_same(model, wrapped)

    run_ranks(work, world_size, timeout=SECONDS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_as_torchs_class(world_size):
    def work(rank):
        model, torchs = torchddp.replicate(seeded(Mlp), transport="c10d"), TorchDDP(seeded(Mlp))
        for _ in range(2):
            train(model, rank)
            train(torchs, rank)
        # gloo's sums of more than two have no one order
        assert_same(model, torchs, **({} if world_size <= 2 else {"rtol": 1e-12, "atol": 1e-12}))

    run_ranks(work, world_size, timeout=SECONDS)
