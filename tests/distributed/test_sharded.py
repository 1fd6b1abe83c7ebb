"""ShardedDataParallel trains like torch's DistributedDataParallel with the plain optimizer; errors."""

import copy
import os
from functools import partial

import pytest
import torch
from torch import nn

import torchddp
from tests.harness import assert_each_raises, each, on_ranks, over_both
from tests.models import same_on_all_ranks
from tests.sharded import batch_of, loss_of, make_pair, small_net
from torchddp import ShardedDataParallel
from torchddp.optim import OSS

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.003}),
    (torch.optim.AdamW, {"lr": 0.003}),
    # It divides by almost zero where gradients cancel, unless its sums start above zero.
    (torch.optim.Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]
IDS = [optim.__name__ for optim, _ in OPTIMIZERS]
SGD = OPTIMIZERS[0]
slow = pytest.mark.slow
# Shared memory needs two ranks.
RUNS = [("c10d", 1), ("shm", 2), ("c10d", 2), ("shm", 4)]
LONG_RUNS = [pytest.param(*run, marks=slow) for run in (("shm", 3), ("c10d", 3), ("c10d", 4))]


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
    pair.assert_equal()


@pytest.mark.rest_is_thorough("shm-2-True", "c10d-2-False", "c10d-4-True")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("transport", "world_size"), [("shm", 2), ("c10d", 2), ("shm", 4), pytest.param("c10d", 4, marks=slow)]
)
@on_ranks()
def test_no_sync_clipping_schedulers_and_freezing_together(rank, transport, set_to_none):
    # AdamW amplifies rounding where gradients are almost zero, and gloo's order for four ranks differs.
    optim, options = (torch.optim.AdamW, {"lr": 0.01}) if transport == "shm" else (torch.optim.SGD, {"lr": 0.05})
    pair = make_pair(optim, options, transport=transport)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 7, 0.7) for _, o in pair.sides()]
    for step in range(50):
        if step in (20, 35):  # frozen, then thawed
            for model, _ in pair.sides():
                for param in model.module.middle.parameters():
                    param.requires_grad_(step == 35)
                    param.grad = None  # a plain optimizer keeps decaying frozen weights with zero gradients
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
    # The norm is summed in another order.
    pair.assert_equal(rtol=2e-4, atol=2e-5)


@on_ranks(3)
def test_backwards_without_zero_grad(rank):
    pair = make_pair(*SGD)
    for step in range(6):
        pair.backward(2 * step)
        pair.backward(2 * step + 1)
        pair.step()
    with pair.sharded.no_sync():  # and reduced by hand
        pair.backward(12)
    pair.sharded.reduce()
    pair.assert_sharded()
    pair.step()
    pair.assert_equal(rtol=1e-5, atol=1e-6)
    loss = loss_of(pair.sharded(batch_of(rank, 0)))
    loss.backward(retain_graph=True)  # the step changes what the graph needs
    pair.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # Accumulating on only one rank.
    pair.backward(0)
    model = pair.sharded
    with model.no_sync(), pytest.raises(RuntimeError, match=r"zero_grad\(\) before accumulating under no_sync"):
        loss_of(model(batch_of(rank, 1))).backward()


@over_both
@on_ranks(2, 3)
def test_gradients_that_the_program_has_set(rank, world_size, transport):
    """They are averaged, also where an average was before; those that no rank uses stay."""
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    optimizer = OSS(module.parameters(), torch.optim.SGD, lr=0.1)
    model = ShardedDataParallel(module, optimizer, transport=transport, find_unused_parameters=True)
    used, unused = (module[name].weight for name in "ab")
    model.module.forward = lambda x: module["a"](x).sum()
    for clear in (True, False, True):
        if clear:
            model.zero_grad()
        for p in (used, unused):
            p.grad = torch.full_like(p, 10.0 * rank)
        model(torch.ones(1, 2)).backward()
        if optimizer.param_to_rank[used] == rank:
            torch.testing.assert_close(used.grad, torch.full_like(used, 1.0 + 5.0 * (world_size - 1)))
        else:
            assert used.grad is None
        assert torch.equal(unused.grad, torch.full_like(unused, 10.0 * rank))


@pytest.mark.rest_is_thorough("0-shm", "1-c10d", "1000-c10d", "8388608-shm")
@over_both
@pytest.mark.parametrize("size", [0, 1, 1000, 2**23])
@on_ranks(3)
def test_message_sizes(size, transport):
    pair = make_pair(reduce_buffer_size=size, make=small_net, transport=transport)
    pair.train_alike(range(8))
    one_each = len(pair.sharded.reducer.plan.buckets) == len(list(small_net().parameters()))
    assert one_each == (size <= 1)


@over_both
@on_ranks(3)
def test_half_precision_messages(transport):
    for options, atol in (({"reduce_fp16": True}, 2e-3), ({"oss_options": {"broadcast_fp16": True}}, 5e-3)):
        pair = make_pair(torch.optim.SGD, {"lr": 0.1}, transport=transport, **options)
        pair.train_alike(range(10), rtol=0.02, atol=atol)
        assert not all(map(torch.equal, pair.sharded.parameters(), pair.reference.parameters()))
    values = torch.cat([p.detach().flatten() for p in pair.sharded.parameters() if p.dtype == torch.float32])
    assert torch.equal(values, values.half().float()) and same_on_all_ranks([values])


@on_ranks(2)
def test_reads_wait_for_parameters_in_flight():
    for transport, overlap in each(["shm", "c10d"], [True, False]):
        pair = make_pair(transport=transport, overlap_gather=overlap)
        module, other = pair.sharded.module, pair.reference.module
        for step in range(10):
            pair.train(range(step, step + 1))
            # Read through the module in all possible ways, right after the step.
            assert torch.equal(module.middle.weight, other.middle.weight)
            theirs = pair.reference.state_dict()
            for (key, value), (name, want) in zip(pair.sharded.state_dict().items(), theirs.items(), strict=True):
                assert key == name and torch.equal(value, want)
            assert torch.equal(module.wide(torch.ones(5).double()), other.wide(torch.ones(5).double()))
            pair.assert_equal()


sgd = partial(OSS, optim=torch.optim.SGD, lr=0.1)
FOREIGN = "optimizer 0 holds parameters that are not the module's: parameter 0 of group 0"
SPARSE = "'0.weight' has sparse gradients, which can't be reduced to one rank. Create its embedding with sparse=False"
SIZE = "reduce_buffer_size must be a number of elements"


@on_ranks(2)
def test_models_that_can_not_be_wrapped(rank):
    net, wrapped = small_net(), small_net()
    foreign_on_1 = sgd((small_net() if rank == 1 else net).parameters())
    elsewhere = RuntimeError, f"ShardedDataParallel failed on other ranks: rank 1: ValueError: {FOREIGN}"
    all_of, taken = sgd(net.parameters()), sgd(wrapped.parameters())
    model = ShardedDataParallel(wrapped, taken)
    twice, some = [all_of, sgd(net.last.parameters())], sgd(net.first.parameters())
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    words = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    assert_each_raises(
        (lambda: ShardedDataParallel(net, sgd(small_net().parameters())), ValueError, FOREIGN),
        (lambda: ShardedDataParallel(net, foreign_on_1), *((ValueError, FOREIGN) if rank == 1 else elsewhere)),
        (lambda: ShardedDataParallel(net, twice), ValueError, "'last.weight' is in optimizers 0 and 1"),
        (lambda: ShardedDataParallel(net, some), ValueError, "trainable parameters are in no optimizer: 'norm.weight'"),
        (lambda: ShardedDataParallel(net, plain), TypeError, "torchddp.optim.OSS, got SGD"),
        (lambda: ShardedDataParallel(net, all_of, reduce_buffer_size=-1), ValueError, SIZE),
        (lambda: ShardedDataParallel(net, all_of, reduce_buffer_size=1.5), ValueError, SIZE),
        (lambda: ShardedDataParallel(net, all_of, reduce_buffer_size=True), ValueError, SIZE),
        (lambda: ShardedDataParallel(wrapped, taken), ValueError, "already belongs to another ShardedDataParallel"),
        (lambda: ShardedDataParallel(words, sgd(words.parameters())), RuntimeError, SPARSE),
        (lambda: taken.add_param_group({"params": [nn.Parameter(torch.ones(3))]}), ValueError, "1 of 1 new parameters"),
        # Modes that reduce to all ranks.
        (lambda: model.register_comm_hook(None, None), RuntimeError, "communication hook"),
        (model.join, RuntimeError, "join"),
        (lambda: model.update_process_group(None), RuntimeError, "share of the optimizer's state"),
        (model.replan, RuntimeError, "plan"),
        (lambda: copy.deepcopy(model), TypeError, "copied or pickled"),
    )
    with pytest.raises(ValueError, match="wrap once"), pytest.warns(UserWarning, match="already wrapped"):
        ShardedDataParallel(torchddp.DistributedDataParallel(net), all_of)
    assert torch.equal(copy.deepcopy(model.module).first.weight, model.module.first.weight)


@over_both
@pytest.mark.parametrize("where", ["backward", "step"])
@on_ranks(2, needed_ranks=[0])
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
