"""fp32 gradients that are sent between hosts in 16 bits and summed in fp32."""

import pytest
import torch
from torch import nn

from tests.comm_hooks import live_on
from tests.harness import on_ranks
from tests.models import Mlp, assert_grads, grads_of, same_on_all_ranks, seeded, step_on
from torchddp import DistributedDataParallel, Precision

HALVES = [torch.bfloat16, torch.float16]


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 1000), nn.Tanh(), nn.Linear(1000, 7))


def _step(model, rank, step=0):
    model.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(5, 300)).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.rest_is_thorough("3-*float16")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@on_ranks(3, 4)
def test_each_host_rounds_its_sum_once(rank, dtype, world_size):
    """With one owner per host, and two."""
    hosts = "aabb"[:world_size]
    live_on(hosts, rank)
    ddp = DistributedDataParallel(_model(), transport="shm", precision=Precision(wire=dtype))
    for step in range(3):
        got = _step(ddp, rank, step)
        for grad, *local in zip(got, *(_step(_model(), r, step) for r in range(world_size)), strict=True):
            sums = dict.fromkeys(hosts, 0.0)
            for host, addend in zip(hosts, local, strict=True):
                sums[host] = sums[host] + addend * (1 / world_size)
            assert torch.equal(grad, sum(total.to(dtype).float() for total in sums.values()))
    assert same_on_all_ranks(got)


@on_ranks(3)
def test_other_dtypes_are_sent_unchanged_and_bad_arguments(rank):
    live_on("aab", rank)
    ddp = DistributedDataParallel(seeded(Mlp), transport="shm", precision=Precision(wire=torch.bfloat16))
    plain = DistributedDataParallel(seeded(Mlp), transport="shm")
    for model in (ddp, plain):
        step_on(model, rank)
    assert_grads(grads_of(ddp), grads_of(plain), rtol=0)
    with pytest.raises(ValueError, match=r"must be torch.bfloat16, torch.float16 or None, got torch.int8"):
        DistributedDataParallel(_model(), precision=Precision(wire=torch.int8))
    with pytest.raises(
        ValueError, match=r"wire \(formerly wire_dtype\) is None on rank 0, 2, torch.bfloat16 on rank 1"
    ):
        DistributedDataParallel(
            _model(), transport="shm", precision=Precision(wire=torch.bfloat16 if rank == 1 else None)
        )
