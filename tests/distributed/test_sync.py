"""Accumulated microbatches give the gradients of a plain loop in one process, whatever parameters each uses."""

import copy
import functools
import inspect
import warnings
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import each, gathered, on_ranks
from tests.models import Branches, Mlp, assert_grads, batch, expected_grads, grads_of, loss_of, seeded, step_on
from tests.whole_buckets import WholeBuckets
from torchddp.sync import DDPSyncStrategy, accumulate, prepare_ddp_module, sync_context

SINGLE, MULTI, FORCED = DDPSyncStrategy
# The branch of `Branches` by rank and microbatch: only in earlier microbatches; on one rank only; first on one rank and
# last on the other.
USAGES = [
    (("left", "left", "right"),) * 4,
    (("left", "left"), ("right", "left"), ("left", "left"), ("left", "right")),
    (("left", "right"), ("right", "left"), ("right", "right"), ("left", "left")),
]
LEFT, BOTH = (("left", "left"),) * 4, (("left", "right"),) * 4


make_branches = partial(seeded, Branches)


def backward(model, rank, micro, branch, step=0):
    loss_of(model(batch(rank, 10 * step + micro, 3, 4), branch)).backward()


def run_step(model, rank, usage, strategy=None, step=0):
    """A step as users write it, without the optimizer."""
    for micro in accumulate(model, len(usage[rank]), strategy):
        backward(model, rank, micro, usage[rank][micro], step)


@functools.cache
def expected(usage, world_size, step=0):
    """The plain loop in one process: sums over microbatches, averages over ranks; None where no rank has a gradient."""
    return expected_grads(make_branches(), lambda model, r: run_step(model, r, usage, step=step), world_size)


def assert_equal_on_all_ranks(model):
    mine = grads_of(model)
    assert_grads(mine, gathered(mine)[0], rtol=0)


def run_mlp(model, rank, count, strategy=None, step=0):
    """A step of `count` microbatches."""
    for micro in accumulate(model, count, strategy):
        step_on(model, rank, count * step + micro)


@on_ranks(2)
def test_forced_sync_of_torchs_own_class_is_refused(rank):
    with pytest.raises(RuntimeError, match=r"FORCED_SYNC needs a torchddp\S+, got torch\S+DistributedDataParallel"):
        run_step(TorchDDP(make_branches()), rank, USAGES[0], FORCED)


@on_ranks(3)
def test_forced_sync_and_untouched_gradients(rank):
    # Forced sync without a search and without a backward.
    for usage in each(USAGES):
        model = torchddp.DDP(make_branches())
        for step in range(2):
            model.zero_grad()
            run_step(model, rank, usage, FORCED, step)
            assert_grads(grads_of(model), expected(usage, 3, step))
            assert_equal_on_all_ranks(model)
    model = torchddp.DDP(make_branches(), find_unused_parameters=True)
    for micro in accumulate(model, 2, FORCED):
        if rank != 1:
            backward(model, rank, micro, "left")
    assert_grads(grads_of(model), expected_grads(model.module, lambda m, r: r == 1 or run_step(m, r, LEFT)))
    assert_equal_on_all_ranks(model)

    # Untouched gradients don't change.
    for ddp_class, strategy in ((torchddp.DDP, FORCED), (torchddp.DDP, SINGLE), (WholeBuckets, FORCED)):
        model = ddp_class(make_branches(), find_unused_parameters=True)
        run_step(model, rank, [["right", "left"]] * 3, strategy)
        before = grads_of(model)
        run_step(model, rank, LEFT, strategy, step=1)
        after = grads_of(model)
        assert torch.equal(before["right.weight"], after["right.weight"])
        assert after["never.weight"] is None
        added = expected(LEFT, 3, 1)["left.weight"]
        torch.testing.assert_close(after["left.weight"], before["left.weight"] + added, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_how_often_gradients_are_reduced(rank):
    for strategy, times in ((SINGLE, 1), (MULTI, 4), (FORCED, 1), (None, 1)):
        model = torchddp.DDP(seeded(Mlp))
        for step in range(2):
            run_mlp(model, rank, 4, strategy, step)
        assert model.reducer.stats()["finished"] == 2 * times
    assert torchddp.DDP(seeded(Mlp)).sync_strategy is SINGLE
    assert torchddp.DDP(seeded(Mlp), find_unused_parameters=True).sync_strategy is MULTI
    assert torchddp.DDP(seeded(Mlp), sync="Forced_Sync").sync_strategy is FORCED
    model = torchddp.DDP(seeded(Mlp), sync=MULTI)
    run_mlp(model, rank, 3)
    assert model.reducer.stats()["finished"] == 3
    assert copy.deepcopy(model).sync_strategy is MULTI


@on_ranks(2)
def test_loops_left_early(rank):
    model = torchddp.DDP(seeded(Mlp))

    def leave(strategy, at, how):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught, suppress(KeyError):
            warnings.simplefilter("always")
            for micro in accumulate(model, 3, strategy):
                step_on(model, rank, micro)
                if micro == at and how == "raise":
                    raise KeyError("of the user's")
                if micro == at:
                    break
        assert model.require_backward_grad_sync
        texts = [str(w.message) for w in caught if "accumulate" in str(w.message)]
        assert all(f"ended early, in microbatch {at} (of 0 to 2). With {strategy.name}" in text for text in texts)
        return len(texts)

    # SINGLE and FORCED reduce all in the last microbatch, MULTI in each.
    told = {(SINGLE, 1): 1, (SINGLE, 2): 0, (FORCED, 1): 1, (FORCED, 2): 0, (MULTI, 1): 0}
    for how in each(["break", "raise"]):
        for case, warned in told.items():
            assert leave(*case, how) == warned
            if not warned:
                assert_equal_on_all_ranks(model)
    # The model keeps training.
    model.zero_grad()
    run_mlp(model, rank, 2, FORCED)
    assert_equal_on_all_ranks(model)


@on_ranks(1)
def test_bodies_that_raise_and_compiled_modules(rank):
    # A body that raises reduces what there is with FORCED_SYNC, because the other ranks do.
    model = torchddp.DDP(seeded(Mlp), sync="forced_sync")
    with pytest.raises(KeyError) if rank == 0 else nullcontext(), sync_context(model, True):
        step_on(model, rank)
        if rank == 0:
            raise KeyError
    assert model.require_backward_grad_sync
    assert model.reducer.stats()["finished"] == 1
    assert_equal_on_all_ranks(model)
    with pytest.raises(KeyError), sync_context(model, False):
        raise KeyError
    assert model.reducer.stats()["finished"] == 1

    # Compiled modules.
    model = torchddp.DDP(seeded(Mlp))
    compiled = torch.compile(model, backend="eager")
    with sync_context(compiled, False):
        assert not model.require_backward_grad_sync
    with sync_context(compiled, True):
        assert model.require_backward_grad_sync


@pytest.mark.skipif(
    "skip_all_reduce_unused_params" not in inspect.signature(TorchDDP).parameters, reason="torch < 2.13"
)
@on_ranks(2)
def test_a_static_graph_stays_known_after_a_step_that_raised(rank):
    raises = []

    def hook(state, bucket):
        if raises:
            raise raises.pop()
        return default_hooks.allreduce_hook(state, bucket)

    model = torchddp.DDP(seeded(Mlp), comm_hook=hook, static_graph=True, skip_all_reduce_unused_params=True)
    step_on(model, rank)
    raises.append(KeyError("once"))
    with pytest.raises(KeyError, match="once"):
        step_on(model, rank, 1)
    model.zero_grad()
    with model.no_sync():
        step_on(model, rank, 2)
    model.reduce()
    assert_grads(grads_of(model), expected_grads(model.module, lambda plain, each_rank: step_on(plain, each_rank, 2)))


@on_ranks(2)
def test_loops_that_reduce_nothing_and_planned_buckets(rank):
    # An outer no_sync() wins.
    plain = seeded(Mlp)
    run_mlp(plain, rank, 2)
    for strategy in (SINGLE, MULTI, FORCED):
        model = torchddp.DDP(seeded(Mlp))
        with model.no_sync():
            run_mlp(model, rank, 2, strategy)
            assert not model.require_backward_grad_sync
        assert model.reducer.stats()["finished"] == 0
        assert_grads(grads_of(model), grads_of(plain))

    # Planned buckets stay as they are.
    model = torchddp.DDP(seeded(Mlp), bucket_cap_mb="auto", transport="c10d")
    for step in range(10):
        run_mlp(model, rank, 2, FORCED, step)
    assert not model.observers.get("bucket_planning").is_under_way
    assert_equal_on_all_ranks(model)


@on_ranks(2)
def test_gradients_that_would_be_dropped(rank):
    # torch reports only indices by default.
    for ddp_class, missing in ((torchddp.DDP, r"left\.weight, left\.bias"), (TorchDDP, "2 3 6 7")):
        model = ddp_class(make_branches())
        with pytest.raises(RuntimeError, match=rf"last microbatch .* SINGLE_AUTO_SYNC .*FORCED_SYNC[\s\S]*{missing}"):
            run_step(model, rank, BOTH)
    model = torchddp.DDP(seeded(Mlp))
    with pytest.warns(UserWarning, match="ended without a backward"):
        for micro in accumulate(model, 2):
            output = model(batch(rank, micro))
            if micro == 0:
                loss_of(output).backward()
    # A last microbatch that is skipped, after others or alone.
    with pytest.warns(UserWarning, match="ended without a backward"):
        for micro in accumulate(model, 2):
            if micro == 0:
                step_on(model, rank, micro)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for set_to_none in (True, False):
            model.zero_grad(set_to_none)
            for _ in accumulate(model, 2):
                pass
        step_on(model, rank, 0)
        for _ in accumulate(model, 1):  # skipped before zero_grad()
            pass
    # A further forward after backward leaves nothing unreduced.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for micro in accumulate(model, 2):
            step_on(model, rank, micro)
            model(batch(rank, micro))


@on_ranks(2)
def test_modes_that_exclude_it(rank):
    def run_nothing(model):
        with sync_context(model, True, FORCED):
            raise AssertionError("refused before the body")

    model = torchddp.DDP(seeded(Mlp))
    with model.join(), pytest.raises(RuntimeError, match=rf"on rank {rank}: under join\(\).*SINGLE_AUTO_SYNC"):
        run_nothing(model)
    for micro in accumulate(model, 2, FORCED, weights=[1, 1]):  # after join() it works again
        step_on(model, rank, micro)
    delayed = seeded(Mlp)
    late = list(delayed.named_parameters())[3:]
    model = torchddp.DDP(delayed, delay_all_reduce_named_params=late, param_to_hook_all_reduce=late[-1][1])
    with pytest.raises(RuntimeError, match="delay_all_reduce_named_params"):
        run_nothing(model)


@on_ranks(2)
def test_a_missing_rank(rank):
    model = torchddp.DDP(seeded(Mlp), transport="shm", timeout=timedelta(seconds=5))
    if rank == 1:
        dist.barrier()
    else:
        with model.no_sync():
            step_on(model, rank)
        with pytest.raises(torchddp.TransportError, match="(?s)waiting for rank 1.*rank 0: comparing the ranks failed"):
            model.reduce()
        dist.barrier()


@on_ranks(2)
def test_arguments_and_prepared_modules():
    with pytest.raises(ValueError, match="unknown sync strategy 'never': .*'single_auto_sync'"):
        torchddp.DDP(seeded(Mlp), sync="never")
    model = prepare_ddp_module(seeded(Mlp), find_unused_parameters=True, bucket_cap_mb=3)
    assert type(model) is torchddp.DDP and model.find_unused_parameters
    frozen = seeded(Mlp).requires_grad_(False)
    assert prepare_ddp_module(frozen, False) is frozen
