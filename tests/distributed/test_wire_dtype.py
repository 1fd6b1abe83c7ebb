"""fp32 gradients that travel in 16 bits and are summed in fp32."""

import pytest
import torch
from torch import nn

from tests.harness import on_ranks, run_ranks
from tests.models import Mlp, batch, grads_of, seeded
from torchddp import DistributedDataParallel

HALVES = [torch.bfloat16, torch.float16]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 1000), nn.Tanh(), nn.Linear(1000, 7))


def _local_grads(rank: int, step: int) -> list[torch.Tensor]:
    model = _model()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(5, 300)).square().sum().backward()
    return [p.grad for p in model.parameters()]


def _train_one(ddp: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    ddp.zero_grad()
    torch.manual_seed(100 * step + rank)
    ddp(torch.randn(5, 300)).square().sum().backward()
    return [p.grad for p in ddp.parameters()]


@pytest.mark.rest_is_thorough("*bfloat16-[124]", "*float16-3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_each_addend_is_rounded_once_and_the_sum_is_not(dtype, world_size):
    def work(rank):
        ddp = DistributedDataParallel(_model(), transport="shm", wire_dtype=dtype)
        for step in range(3):
            got = _train_one(ddp, rank, step)
            local = [_local_grads(r, step) for r in range(world_size)]
            for index, grad in enumerate(got):
                want = torch.zeros_like(grad)
                for r in range(world_size):
                    want += (local[r][index] * (1 / world_size)).to(dtype).float()
                exact = sum(local[r][index] / world_size for r in range(world_size))
                # Buckets of up to 8 KiB travel as they are.
                assert torch.equal(grad, want) or (grad.nbytes <= 8192 and torch.allclose(grad, exact)), index
        return [g.clone() for g in got]

    results = run_ranks(work, world_size)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("owners", [1, 2])
def test_between_hosts(owners, monkeypatch):
    def work(rank):
        monkeypatch.setenv("TORCHDDP_HOST_ID", "a" if rank < 2 else "b")
        ddp = DistributedDataParallel(_model(), transport="shm", wire_dtype=torch.bfloat16)
        got = _train_one(ddp, rank, 0)
        local = [_local_grads(r, 0) for r in range(world_size)]
        for index, grad in enumerate(got):
            exact = sum(local[r][index] / world_size for r in range(world_size))
            torch.testing.assert_close(grad, exact, rtol=0.02, atol=0.02 * exact.abs().max().item())
        return [g.clone() for g in got]

    world_size = 2 + owners
    results = run_ranks(work, world_size)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@on_ranks(2, 3, 4)
def test_ranks_without_inputs(rank, dtype, world_size):
    """They send zeros as the others send their gradients."""
    ddp = DistributedDataParallel(_model(), transport="shm", wire_dtype=dtype)
    grads = []
    with ddp.join():
        for step in range(1 + rank):
            grads = [g.clone() for g in _train_one(ddp, rank, step)]
    last = world_size - 1
    if rank == last:
        for got, local in zip(grads, _local_grads(rank, last), strict=True):
            exact = local / world_size
            torch.testing.assert_close(got, exact, rtol=0.01, atol=0.01 * exact.abs().max().item())


@on_ranks(2)
def test_other_dtypes_travel_as_they_are(rank):
    ddp = DistributedDataParallel(seeded(Mlp), transport="shm", wire_dtype=torch.bfloat16)
    plain = DistributedDataParallel(seeded(Mlp), transport="shm")
    for model in (ddp, plain):
        model(batch(rank)).sum().backward()
    ours, theirs = grads_of(ddp), grads_of(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@on_ranks(2)
def test_bad_arguments():
    with pytest.raises(ValueError, match=r"must be torch.bfloat16, torch.float16 or None, got torch.int8"):
        DistributedDataParallel(_model(), wire_dtype=torch.int8)
    with pytest.raises(RuntimeError, match=r"wire_dtype needs shared memory .*c10d"):
        DistributedDataParallel(_model(), transport="c10d", wire_dtype=torch.bfloat16)
