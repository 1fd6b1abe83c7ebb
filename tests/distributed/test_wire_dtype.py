"""fp32 gradients that are sent in 16 bits and summed in fp32."""

import os

import pytest
import torch
from torch import nn

from tests.harness import each, on_ranks
from tests.models import Mlp, assert_grads, grads_of, same_on_all_ranks, seeded, step_on
from torchddp import DistributedDataParallel

HALVES = [torch.bfloat16, torch.float16]


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 1000), nn.Tanh(), nn.Linear(1000, 7))


def _step(model, rank, step=0):
    model.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(5, 300)).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.rest_is_thorough("[124]-*bfloat16", "3-*float16")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@on_ranks(1, 2, 3, 4)
def test_each_addend_is_rounded_once_and_the_sum_is_not(rank, dtype, world_size):
    ddp = DistributedDataParallel(_model(), transport="shm", wire_dtype=dtype)
    for step in range(3):
        got = _step(ddp, rank, step)
        for grad, *local in zip(got, *(_step(_model(), r, step) for r in range(world_size)), strict=True):
            want = sum((addend * (1 / world_size)).to(dtype).float() for addend in local)
            # Buckets of up to 8 KiB are sent unchanged.
            assert torch.equal(grad, want) or (grad.nbytes <= 8192 and torch.allclose(grad, sum(local) / world_size))
    assert same_on_all_ranks(got)


@on_ranks(3, 4)
def test_between_hosts(rank, world_size):
    """With one owner per host, and two."""
    os.environ["TORCHDDP_HOST_ID"] = "a" if rank < 2 else "b"
    got = _step(DistributedDataParallel(_model(), transport="shm", wire_dtype=torch.bfloat16), rank)
    for grad, *local in zip(got, *(_step(_model(), r) for r in range(world_size)), strict=True):
        exact = sum(local) / world_size
        torch.testing.assert_close(grad, exact, rtol=0.02, atol=0.02 * exact.abs().max().item())
    assert same_on_all_ranks(got)


@on_ranks(2, 3, 4)
def test_ranks_without_inputs(rank, world_size):
    """They send zeros in the same format as the others' gradients."""
    for dtype in each(HALVES):
        ddp = DistributedDataParallel(_model(), transport="shm", wire_dtype=dtype)
        with ddp.join():
            for step in range(1 + rank):
                grads = [g.clone() for g in _step(ddp, rank, step)]
        last = world_size - 1
        if rank == last:
            for got, local in zip(grads, _step(_model(), rank, last), strict=True):
                exact = local / world_size
                torch.testing.assert_close(got, exact, rtol=0.01, atol=0.01 * exact.abs().max().item())


@on_ranks(2)
def test_other_dtypes_are_sent_unchanged_and_bad_arguments(rank):
    ddp = DistributedDataParallel(seeded(Mlp), transport="shm", wire_dtype=torch.bfloat16)
    plain = DistributedDataParallel(seeded(Mlp), transport="shm")
    for model in (ddp, plain):
        step_on(model, rank)
    assert_grads(grads_of(ddp), grads_of(plain), rtol=0)
    with pytest.raises(ValueError, match=r"must be torch.bfloat16, torch.float16 or None, got torch.int8"):
        DistributedDataParallel(_model(), wire_dtype=torch.int8)
    with pytest.raises(RuntimeError, match=r"wire_dtype needs shared memory .*c10d"):
        DistributedDataParallel(_model(), transport="c10d", wire_dtype=torch.bfloat16)
