"""Accumulated microbatches give the gradients of the plain loop on one process, whatever each of them uses."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import each, on_ranks
from tests.microbatches import (
    FORCED,
    MULTI,
    SINGLE,
    USAGES,
    assert_equal_on_all_ranks,
    assert_same,
    backward,
    expected,
    make_branches,
    run_step,
    with_zeros,
)
from tests.models import Mlp, batch, grads_of, loss_of, seeded, step_on
from tests.sharded import batch_of, small_net
from tests.sharded import loss_of as sharded_loss_of
from tests.sharded import make_pair as make_sharded_pair
from tests.whole_buckets import WholeBuckets
from torchddp.sync import accumulate

EVERYTHING_IN_SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}


def check_step(model, rank, usage, strategy, step=0, zeros=False):
    run_step(model, rank, usage, strategy, step)
    want = expected(usage, dist.get_world_size(), step)
    assert_same(grads_of(model), with_zeros(want, model.module) if zeros else want, rtol=1e-10, atol=1e-12)
    assert_equal_on_all_ranks(model)
    model.zero_grad(set_to_none=step % 2 == 0 or not zeros)


def check_usages(rank, ddp_class, strategy, **options):
    model = ddp_class(make_branches(), find_unused_parameters=True, **options)
    for step, usage in enumerate([*USAGES, USAGES[0]]):  # buckets are rebuilt after the first
        check_step(model, rank, usage, strategy, step)


@pytest.mark.rest_is_thorough("[123]")
@on_ranks(1, 2, 3, 4)
def test_different_parameters_in_different_microbatches(rank):
    for strategy in (SINGLE, MULTI, FORCED):
        check_usages(rank, torchddp.DDP, strategy)
        check_usages(rank, torchddp.DDP, strategy, transport="c10d", **EVERYTHING_IN_SMALL_BUCKETS)
        check_usages(rank, torchddp.DDP, strategy, gradient_as_bucket_view=False)
        check_usages(rank, WholeBuckets, strategy, **EVERYTHING_IN_SMALL_BUCKETS)
    check_usages(rank, torchddp.DDP, FORCED, comm_hook=(None, allreduce_hook))


@on_ranks(2, 3)
def test_torchs_own_class(rank):
    for strategy in (SINGLE, MULTI):
        check_usages(rank, TorchDDP, strategy)
    with pytest.raises(RuntimeError, match=r"which torch\S+DistributedDataParallel can't: wrap the model in torchddp"):
        run_step(TorchDDP(make_branches()), rank, USAGES[0], FORCED)


@on_ranks(2)
def test_other_modes(rank):
    for strategy in each((SINGLE, FORCED)):  # buckets that may be skipped are not if an earlier microbatch used them
        options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, **EVERYTHING_IN_SMALL_BUCKETS}
        model = torchddp.DDP(make_branches(), **options)
        for step in range(2):
            check_step(model, rank, [["left", "right"]] * 2, strategy, step)

    # Static graphs.
    model = torchddp.DDP(make_branches(), static_graph=True, find_unused_parameters=True)
    for step, strategy in enumerate((FORCED, FORCED, SINGLE, FORCED, SINGLE)):
        check_step(model, rank, [["left", "left"]] * 2, strategy, step)

    # Frozen parameters.
    module = make_branches()
    module.left.weight.requires_grad_(False)  # at wrapping: unknown to the reducer
    model = torchddp.DDP(module)
    run_step(model, rank, [["left", "right"]] * 2, FORCED)
    assert module.left.weight.grad is None and module.left.bias.grad is not None
    model.zero_grad()
    module.right.requires_grad_(False)  # later, as GANs do
    run_step(model, rank, [["left", "right"]] * 2, FORCED)
    assert module.right.weight.grad is None and module.right.bias.grad is None
    assert torch.count_nonzero(module.left.bias.grad) > 0
    assert_equal_on_all_ranks(model)

    # An fp16 hook after backward rounds as in backward.
    grads = []
    for strategy in (SINGLE, FORCED):
        model = torchddp.DDP(seeded(lambda: Mlp(dtype=torch.float32)), comm_hook=(None, fp16_compress_hook))
        for micro in accumulate(model, 2, strategy):
            loss_of(model(batch(rank, micro, dtype=torch.float32))).backward()
        grads.append(grads_of(model))
    assert_same(grads[1], grads[0], rtol=0, atol=0)
    assert_equal_on_all_ranks(model)


@on_ranks(3)
def test_forced_sync_without_a_search_and_without_a_backward(rank):
    for usage in each(USAGES):
        model = torchddp.DDP(make_branches())
        for step in range(2):
            check_step(model, rank, usage, FORCED, step, zeros=True)
    model = torchddp.DDP(make_branches(), find_unused_parameters=True)
    for micro in accumulate(model, 2, FORCED):
        if rank != 1:
            backward(model, rank, micro, "left")
    usage = [["left", "left"], [], ["left", "left"]]
    assert_same(grads_of(model), expected(usage, 3), rtol=1e-10, atol=1e-12)
    assert_equal_on_all_ranks(model)


@on_ranks(3)
def test_gradients_nobody_touched_keep_their_bits(rank):
    for ddp_class, strategy in ((torchddp.DDP, FORCED), (torchddp.DDP, SINGLE), (WholeBuckets, FORCED)):
        model = ddp_class(make_branches(), find_unused_parameters=True)
        run_step(model, rank, [["right", "left"]] * 3, strategy)
        before = grads_of(model)
        run_step(model, rank, [["left", "left"]] * 3, strategy, step=1)
        after = grads_of(model)
        assert torch.equal(before["right.weight"], after["right.weight"])
        assert after["never.weight"] is None
        added = expected([["left", "left"]] * 3, 3, 1)["left.weight"]
        torch.testing.assert_close(after["left.weight"], before["left.weight"] + added, rtol=1e-10, atol=1e-12)


@on_ranks(2, 3)
def test_one_reduction_gives_the_same_bits_in_backward_and_after_it(rank):
    grads = []
    for strategy in (SINGLE, FORCED):
        model = torchddp.DDP(seeded(lambda: Mlp(dtype=torch.float32)), transport="shm")
        for step in range(3):
            for micro in accumulate(model, 3, strategy):
                loss_of(model(batch(rank, 3 * step + micro, dtype=torch.float32))).backward()
        grads.append(grads_of(model))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@on_ranks(2)
def test_how_often_gradients_are_reduced(rank):
    for strategy, times in ((SINGLE, 1), (MULTI, 4), (FORCED, 1), (None, 1)):
        calls = []

        def hook(state, bucket, calls=calls):
            calls.append(bucket.index())
            return allreduce_hook(None, bucket)

        model = torchddp.DDP(seeded(Mlp), comm_hook=hook)
        for step in range(2):
            for micro in accumulate(model, 4, strategy):
                step_on(model, rank, 4 * step + micro)
        assert model.reducer.stats()["finished"] == 2 * times
        assert len(calls) == 2 * times * len(model.reducer.plan)
    for options, strategy in (
        ({}, SINGLE),
        ({"find_unused_parameters": True}, MULTI),
        ({"sync": "Forced_Sync"}, FORCED),
    ):
        assert torchddp.DDP(seeded(Mlp), **options).sync_strategy is strategy
    model = torchddp.DDP(seeded(Mlp), sync=MULTI)
    for micro in accumulate(model, 3):
        step_on(model, rank, micro)
    assert model.reducer.stats()["finished"] == 3
    assert copy.deepcopy(model).sync_strategy is MULTI


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, ids):
        return self.head(self.table(ids))


@on_ranks(2)
def test_sparse_gradients(rank):
    def ids(of_rank, micro):
        return torch.tensor([of_rank, micro + 2, 6])

    model = torchddp.DDP(seeded(Words))
    for micro in accumulate(model, 2, FORCED):
        loss_of(model(ids(rank, micro))).backward()
    total = seeded(Words)
    for of_rank in range(2):
        for micro in range(2):
            loss_of(total(ids(of_rank, micro))).backward()
    for name, parameter in total.named_parameters():
        mine = model.module.get_parameter(name).grad.to_dense()
        torch.testing.assert_close(mine, parameter.grad.to_dense() / 2)


@on_ranks(2, 3)
def test_sharded_gradients(rank):
    for search in (False, True):
        pair = make_sharded_pair(make=small_net, find_unused_parameters=search)
        for step, strategy in enumerate((FORCED, SINGLE, MULTI, FORCED)):
            for model, plain in ((pair.sharded, None), (pair.reference, SINGLE)):
                for micro in accumulate(model, 3, plain or strategy):
                    sharded_loss_of(model(batch_of(rank, 3 * step + micro))).backward()
            pair.assert_sharded()
            for _, optimizer in pair.sides():
                optimizer.step()
                optimizer.zero_grad()
        pair.assert_equal(rtol=1e-4, atol=1e-5)
