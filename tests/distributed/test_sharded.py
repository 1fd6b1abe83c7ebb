"""ShardedDataParallel trains as torch's DistributedDataParallel with the plain optimizer does; what it refuses."""

import copy
import os

import pytest
import torch
from torch import nn

import torchddp
from tests.harness import each, on_ranks, run_outcomes
from tests.models import seeded
from tests.sharded import batch_of, loss_of, make_pair, small_net
from torchddp import ShardedDataParallel
from torchddp.optim import OSS

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.003}),
    (torch.optim.AdamW, {"lr": 0.003}),
    # Divides by next to nothing where gradients cancel, unless its sums begin above zero.
    (torch.optim.Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]
IDS = [optim.__name__ for optim, _ in OPTIMIZERS]
SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
slow = pytest.mark.slow
over_both = pytest.mark.parametrize("transport", ["shm", "c10d"])
# Shared memory takes two.
RUNS = [("c10d", 1), ("shm", 2), ("c10d", 2), ("shm", 4)]
LONG_RUNS = [pytest.param(*run, marks=slow) for run in (("shm", 3), ("c10d", 3), ("c10d", 4))]


def tolerance(transport, world_size):
    """Sums of more than two ranks have no one order through gloo."""
    return {"rtol": 1e-4, "atol": 1e-5} if transport == "c10d" and world_size > 2 else {}


@pytest.mark.rest_is_thorough(
    "SGD-c10d-1", "Adam-shm-2", "AdamW-c10d-2", "Adafactor-shm-4", "Adagrad-shm-3", "Adam-c10d-3"
)
@pytest.mark.parametrize(("transport", "world_size"), RUNS + LONG_RUNS)
@pytest.mark.parametrize(("optim", "options"), OPTIMIZERS, ids=IDS)
@on_ranks()
def test_fifty_steps(optim, options, world_size, transport):
    pair = make_pair(optim, options, transport=transport)
    for step in range(50):
        pair.backward(step)
        pair.assert_sharded()
        pair.step()
    pair.assert_equal(**tolerance(transport, world_size))


@pytest.mark.rest_is_thorough("shm-2-True", "c10d-2-False", "c10d-4-True")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("transport", "world_size"), [("shm", 2), ("c10d", 2), ("shm", 4), pytest.param("c10d", 4, marks=slow)]
)
@on_ranks()
def test_no_sync_clipping_schedulers_and_freezing_together(rank, transport, set_to_none):
    # AdamW makes much of rounding where gradients are nearly zero, and gloo's sums of four have another order.
    optim, options = (torch.optim.AdamW, {"lr": 0.01}) if transport == "shm" else (torch.optim.SGD, {"lr": 0.05})
    pair = make_pair(optim, options, transport=transport)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 7, 0.7) for _, o in pair.sides()]
    for step in range(50):
        if step in (20, 35):  # frozen, then thawed
            for model, _ in pair.sides():
                for param in model.module.middle.parameters():
                    param.requires_grad_(step == 35)
                    param.grad = None  # a plain optimizer goes on decaying frozen weights that have a gradient of zeros
            pair.rewrap()
        for model, _ in pair.sides():
            with model.no_sync():
                loss_of(model(batch_of(rank, 1000 + step))).backward()
        pair.backward(step)
        mine = pair.oss.clip_grad_norm(0.05)
        theirs = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.05)
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-7)
        pair.step(set_to_none=set_to_none)
        for scheduler in schedulers:
            scheduler.step()
    # The norm is added up in another order.
    pair.assert_equal(rtol=2e-4, atol=2e-5)


@on_ranks(3)
def test_backwards_without_zero_grad(rank):
    pair = make_pair(*SGD)
    for step in range(6):
        pair.backward(2 * step)
        pair.backward(2 * step + 1)
        pair.step()
    pair.assert_equal(rtol=1e-5, atol=1e-6)
    # Accumulating on one rank alone.
    pair.backward(0)
    model = pair.sharded
    with model.no_sync(), pytest.raises(RuntimeError, match=r"zero_grad\(\) before accumulating under no_sync"):
        loss_of(model(batch_of(rank, 1))).backward()


@over_both
@on_ranks(2)
def test_reduce_by_hand(rank, transport):
    pair = make_pair(transport=transport)
    for step in range(5):
        for microbatch in range(3):
            with pair.sharded.no_sync():
                loss_of(pair.sharded(batch_of(rank, 10 * step + microbatch))).backward()
            pair.reference.require_backward_grad_sync = microbatch == 2
            loss_of(pair.reference(batch_of(rank, 10 * step + microbatch))).backward()
        pair.sharded.reduce()
        pair.assert_sharded()
        pair.step()
    pair.assert_equal()


@pytest.mark.rest_is_thorough("0-shm", "1-c10d", "1000-c10d", "8388608-shm")
@over_both
@pytest.mark.parametrize("size", [0, 1, 1000, 2**23])
@on_ranks(3)
def test_message_sizes(size, transport):
    pair = make_pair(reduce_buffer_size=size, make=small_net, transport=transport)
    pair.train_alike(range(8), **tolerance(transport, 3))
    one_each = len(pair.sharded.reducer.plan.buckets) == len(list(small_net().parameters()))
    assert one_each == (size <= 1)


@over_both
@on_ranks(3)
def test_gradients_in_half_precision(transport):
    pair = make_pair(torch.optim.SGD, {"lr": 0.1}, reduce_fp16=True, transport=transport)
    pair.train_alike(range(10), rtol=0.02, atol=2e-3)
    with pytest.raises(AssertionError):
        pair.assert_equal()


@on_ranks(2)
def test_parameters_on_their_way_are_waited_for():
    for transport, overlap in each(["shm", "c10d"], [True, False]):
        pair = make_pair(transport=transport, overlap_gather=overlap)
        module, other = pair.sharded.module, pair.reference.module
        for step in range(10):
            pair.train(range(step, step + 1))
            # Read through the module in all the ways there are, right after the step.
            assert torch.equal(module.middle.weight, other.middle.weight)
            for key, value in pair.sharded.state_dict().items():
                assert torch.equal(value, other.state_dict()[key.removeprefix("module.")])
            assert torch.equal(module.wide(torch.ones(5).double()), other.wide(torch.ones(5).double()))
            pair.assert_equal()


def sgd(params):
    return OSS(params, torch.optim.SGD, lr=0.1)


class Words(nn.Module):
    """Has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 2)


FOREIGN = r"optimizer 0 holds \d+ parameters that are not the module's: parameter 0 of group 0"
SIZE = "reduce_buffer_size must be a number of elements"
REFUSED = [
    (lambda net: sgd(small_net().parameters()), {}, ValueError, FOREIGN),
    (
        lambda net: [sgd(net.parameters()), sgd(net.last.parameters())],
        {},
        ValueError,
        "'last.weight' is in optimizer 0 and",
    ),
    (
        lambda net: sgd(net.first.parameters()),
        {},
        ValueError,
        "trainable parameters are in no optimizer: 'norm.weight'",
    ),
    (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), {}, TypeError, "torchddp.optim.OSS, got SGD"),
    *((lambda net: sgd(net.parameters()), {"reduce_buffer_size": n}, ValueError, SIZE) for n in (-1, 1.5, True)),
]


@on_ranks(2)
def test_what_can_not_be_wrapped():
    for make, options, error, words in each(REFUSED):
        net = small_net()
        with pytest.raises(error, match=words):
            ShardedDataParallel(net, make(net), **options)
    net = small_net()
    optimizer = sgd(net.parameters())
    ShardedDataParallel(net, optimizer)
    with pytest.raises(ValueError, match="belongs to another ShardedDataParallel already"):
        ShardedDataParallel(net, optimizer)
    net = small_net()
    optimizer = sgd(net.parameters())
    with pytest.raises(ValueError, match="wrap once"), pytest.warns(UserWarning, match="already wrapped"):
        ShardedDataParallel(torchddp.DistributedDataParallel(net), optimizer)
    net = Words()
    with pytest.raises(RuntimeError, match=r"'words.weight' has sparse gradients.*sparse=False"):
        ShardedDataParallel(net, sgd(net.parameters()))


def test_one_rank_alone_has_a_wrong_optimizer():
    def work(rank):
        net, other = small_net(), small_net()
        ShardedDataParallel(net, sgd((other if rank == 1 else net).parameters()))

    errors = [outcome.error for outcome in run_outcomes(work, 2)]
    assert "ValueError: optimizer 0 holds" in errors[1]
    assert "ShardedDataParallel failed on other ranks" in errors[0] and "optimizer 0 holds" in errors[0]


@on_ranks(2)
def test_modes_that_reduce_to_all_ranks():
    net = small_net()
    model = ShardedDataParallel(net, sgd(net.parameters()))
    with pytest.raises(RuntimeError, match="communication hook"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(RuntimeError, match="join"):
        model.join()
    with pytest.raises(RuntimeError, match="share of the optimizer's state"):
        model._update_process_group(torch.distributed.group.WORLD)
    with pytest.raises(RuntimeError, match="plan"):
        model.replan()
    with pytest.raises(TypeError, match="copied or pickled"):
        copy.deepcopy(model)
    assert torch.equal(copy.deepcopy(model.module).first.weight, model.module.first.weight)


@on_ranks(2)
def test_states_and_parameters_that_are_refused_change_nothing(rank):
    pair = make_pair(make=small_net)
    pair.train(range(3))
    state = torch.optim.AdamW(seeded(lambda: nn.Linear(3, 3)).parameters()).state_dict()
    before = str(pair.oss.local_state_dict())
    with pytest.raises(ValueError):
        pair.oss.load_state_dict(state)
    assert str(pair.oss.local_state_dict()) == before
    with pytest.raises(ValueError, match="1 of 1 new parameters"):
        pair.oss.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    pair.train_alike(range(3, 6))
    pair.oss.consolidate_state_dict(recipient_rank=0)
    if rank == 1:
        with pytest.raises(RuntimeError, match="rank 1 has no consolidated state"):
            pair.oss.state_dict()
    else:
        assert len(pair.oss.state_dict()["state"]) == len(list(pair.sharded.parameters()))
    pair.train_alike(range(6, 8))
    # A step with a graph that needs the old values.
    loss = loss_of(pair.sharded(batch_of(rank, 0)))
    loss.backward(retain_graph=True)
    pair.oss.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("where", ["backward", "step"])
@on_ranks(2, timeout=30, needed_ranks=[0])
def test_a_peer_that_dies(rank, where, transport):
    pair = make_pair(transport=transport)
    pair.train(range(2))
    if where == "backward" and rank == 1:
        os._exit(3)
    with pytest.raises(torchddp.TransportError, match="parameters" if where == "step" else ""):
        loss_of(pair.sharded(batch_of(rank, 2))).backward()
        if rank == 1:
            os._exit(3)
        assert where == "step"
        pair.oss.step()
        pair.sharded.synchronize()
