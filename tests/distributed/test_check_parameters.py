"""Checks(parameters_every=): one wrong bit on one rank is found and reported on all ranks, with its parameter."""

import math

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.harness import each, gathered, on_ranks, over_both
from tests.models import Mlp, seeded, train
from tests.sharded import batch_of, loss_of, small_net
from torchddp import Checks

pytestmark = pytest.mark.beyond_torch("does not compare parameters")


def flip(parameter, index=0, bit=0):
    """Flip one bit of one element."""
    words = parameter.data.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.itemsize])
    words[index] ^= 1 << bit


def caught(call):
    with pytest.raises(torchddp.DesyncError) as info:
        call()
    return info.value


@over_both
@on_ranks(1, 2, 3)
def test_one_bit_on_one_rank_is_named_on_all(rank, world_size, transport):
    odd = world_size - 1
    ddp = torchddp.DistributedDataParallel(seeded(Mlp), checks=Checks(parameters_every=2), transport=transport)
    train(ddp, rank, 7)
    torchddp.check_parameters(ddp)
    if world_size == 1:
        return
    if rank == odd:
        flip(ddp.module.middle.bias, 5, 51)
    train(ddp, rank, 1)  # the eighth step: the next check is before the ninth
    error = caught(lambda: train(ddp, rank, 1))
    assert (error.step, error.parameter, error.num_parameters) == (8, "middle.bias", 1)
    assert error.ranks == (odd,)
    values = gathered(float(ddp.module.middle.bias[5]))
    assert error.max_difference == pytest.approx(abs(values[odd] - values[0]), rel=1e-12) and error.max_difference
    assert f"rank {odd} in 1 element," in str(error) and ("the majority" in str(error)) >= (world_size > 2)
    assert gathered(str(error)) == [str(error)] * world_size
    for parameter in ddp.parameters():  # repaired, training continues
        dist.broadcast(parameter.data, 0)
    train(ddp, rank, 5)


@on_ranks(2)
def test_what_is_compared_and_what_is_not(rank):
    def model_of(*values):
        module = torch.nn.Module()
        for index, value in enumerate(values):
            module.register_parameter(f"p{index}", torch.nn.Parameter(value.clone()))
        module.register_parameter("frozen", torch.nn.Parameter(torch.ones(2), requires_grad=False))
        module.register_parameter("same", module.p0)
        module.register_buffer("mean", torch.zeros(3))
        return torchddp.DistributedDataParallel(module)

    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
    ddp = model_of(*(torch.arange(6.0).to(dtype).view(2, 3) for dtype in dtypes), torch.empty(0), torch.zeros(()))
    torchddp.check_parameters(ddp)
    ddp.module.mean += rank  # a buffer
    torchddp.check_parameters(ddp)
    for index, dtype in enumerate(dtypes):
        parameter = getattr(ddp.module, f"p{index}")
        real = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter.data
        real.view(-1)[3] += 0.5 * rank
        error = caught(lambda: torchddp.check_parameters(ddp))
        assert (error.parameter, error.ranks, error.num_parameters) == (f"p{index}", (1,), 1)
        assert error.max_difference == 0.5 and f"{dtype} [2, 3]" in str(error)
        assert "rank 1 in 1 element, by up to 0.5)" in str(error)
        assert "causes: the module was called instead of the model" in str(error)  # no step was synchronized
        real.view(-1)[3] -= 0.5 * rank
    with torch.no_grad():
        ddp.module.frozen[1] = 1 + rank
        assert caught(lambda: torchddp.check_parameters(ddp)).parameter == "frozen"
        ddp.module.frozen.fill_(1)
        ddp.module.p6.fill_(-0.0 if rank else 0.0)
        error = caught(lambda: torchddp.check_parameters(ddp))
        assert (error.parameter, error.max_difference) == ("p6", 0.0)
        ddp.module.p6.fill_(math.nan)
        torchddp.check_parameters(ddp)
        flip(ddp.module.p6, 0, rank)  # another NaN
        assert caught(lambda: torchddp.check_parameters(ddp)).parameter == "p6"
        ddp.module.p6.fill_(math.inf if rank else 1.0)
        error = caught(lambda: torchddp.check_parameters(ddp))
        assert error.max_difference == 0.0 and "rank 1 in 1 element, infinite or NaN)" in str(error)
        ddp.module.p6.fill_(0)
        ddp.module.p4[0] = complex(2, rank and math.nan)
        ddp.module.p4[1, 2] += rank
        error = caught(lambda: torchddp.check_parameters(ddp))
        assert "rank 1 in 4 elements, 3 of them infinite or NaN, by up to 1)" in str(error)


@on_ranks(3)
def test_ranks_that_differ_in_different_parameters(rank):
    for transport in each(["shm", "c10d"]):
        ddp = torchddp.DistributedDataParallel(seeded(Mlp), transport=transport)
        if rank == 0:
            flip(ddp.module.last.weight)
        if rank == 2:
            flip(ddp.module.first.bias)
        error = caught(lambda ddp=ddp: torchddp.check_parameters(ddp))
        assert (error.parameter, error.ranks, error.num_parameters) == ("first.bias", (2,), 2)
        if rank == 2:
            flip(ddp.module.first.bias)
        error = caught(lambda ddp=ddp: torchddp.check_parameters(ddp))
        assert (error.parameter, error.ranks, error.num_parameters) == ("last.weight", (0,), 1)
        if rank == 1:
            ddp.module.register_parameter("more", torch.nn.Parameter(torch.ones(1)))
        error = caught(lambda ddp=ddp: torchddp.check_parameters(ddp))
        assert error.ranks == (1,) and "rank 0: 5, rank 1: 6, rank 2: 5" in str(error)


@over_both
@on_ranks(2)
def test_checks_wait_for_updates_in_flight(rank, transport):
    sharded_net = seeded(small_net)
    optimizer = torchddp.optim.OSS(sharded_net.parameters(), torch.optim.SGD, lr=0.1)
    sharded = torchddp.ShardedDataParallel(sharded_net, optimizer, transport=transport)
    for step in range(4):
        loss_of(sharded(batch_of(rank, step))).backward()
        optimizer.step()
        optimizer.zero_grad()
        torchddp.check_parameters(sharded)
    flip(next(iter(sharded.module.parameters())), bit=rank)
    assert caught(lambda: torchddp.check_parameters(sharded)).ranks == (1,)


@on_ranks(3)
def test_another_process_group_restarts_the_count(rank):
    ddp = torchddp.DistributedDataParallel(seeded(Mlp), checks=Checks(parameters_every=2), transport="c10d")
    train(ddp, rank, 3)
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    ddp.update_process_group(group)
    flip(ddp.module.last.weight, bit=rank)
    train(ddp, rank, 2)
    assert caught(lambda: train(ddp, rank, 1)).step == 5
