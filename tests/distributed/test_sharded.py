"""ShardedDataParallel trains as torch's DistributedDataParallel with the plain optimizer does."""

import pytest
import torch

from tests.harness import each, on_ranks
from tests.sharded import batch_of, loss_of, make_pair, small_net

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
