"""Accumulated microbatches give the gradients of the plain loop on one process, whatever each of them uses."""

import copy
import re
import textwrap
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import run_ranks
from tests.microbatches import FORCED, MULTI, SINGLE, USAGES, backward, expected, make_branches, run_step, with_zeros
from tests.models import Mlp, batch, grads_of, loss_of, seeded, step_on
from tests.sharded import batch_of, small_net
from tests.sharded import loss_of as sharded_loss_of
from tests.sharded import make_pair as make_sharded_pair
from tests.whole_buckets import WholeBuckets
from torchddp.optim import DeferredOptimizer
from torchddp.sync import accumulate, prepare_ddp_module, sync_context

EVERYTHING_IN_SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}


def assert_same(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name, grad in want.items():
        if grad is None:
            assert got[name] is None, f"{name}: got {got[name]}, nobody has a gradient"
        else:
            assert got[name] is not None, f"{name}: got None"
            torch.testing.assert_close(got[name], grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def assert_equal_on_all_ranks(model):
    for name, grad in grads_of(model).items():
        present = torch.tensor([grad is not None])
        dist.broadcast(present, 0)
        assert bool(present) == (grad is not None), name
        if grad is not None:
            first = grad.clone()
            dist.broadcast(first, 0)
            assert torch.equal(grad, first), name


def check_usages(rank, ddp_class, strategy, **options):
    world_size = dist.get_world_size()
    model = ddp_class(make_branches(), find_unused_parameters=True, **options)
    for step, usage in enumerate([*USAGES, USAGES[0]]):  # buckets are rebuilt after the first
        run_step(model, rank, usage, strategy, step)
        assert_same(grads_of(model), expected(usage, world_size, step), rtol=1e-10, atol=1e-12)
        assert_equal_on_all_ranks(model)
        model.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_different_parameters_in_different_microbatches(world_size):
    def work(rank):
        for strategy in (SINGLE, MULTI, FORCED):
            check_usages(rank, torchddp.DDP, strategy)
            check_usages(rank, torchddp.DDP, strategy, transport="c10d", **EVERYTHING_IN_SMALL_BUCKETS)
            check_usages(rank, torchddp.DDP, strategy, gradient_as_bucket_view=False)
            check_usages(rank, WholeBuckets, strategy, **EVERYTHING_IN_SMALL_BUCKETS)
        check_usages(rank, torchddp.DDP, FORCED, comm_hook=(None, allreduce_hook))
        check_usages(rank, torchddp.DDP, FORCED, decoupled=True)

    run_ranks(work, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_own_class(world_size):
    def work(rank):
        for strategy in (SINGLE, MULTI):
            check_usages(rank, TorchDDP, strategy)
        with pytest.raises(
            RuntimeError, match=r"which torch\S+DistributedDataParallel can't: wrap the model in torchddp"
        ):
            run_step(TorchDDP(make_branches()), rank, USAGES[0], FORCED)

    run_ranks(work, world_size)


def test_buckets_that_may_be_skipped_are_not_if_an_earlier_microbatch_used_them():
    def work(rank):
        for strategy in (SINGLE, FORCED):
            usage = [["left", "right"]] * 2
            model = torchddp.DDP(
                make_branches(),
                find_unused_parameters=True,
                skip_all_reduce_unused_params=True,
                **EVERYTHING_IN_SMALL_BUCKETS,
            )
            for step in range(2):
                run_step(model, rank, usage, strategy, step)
                assert_same(grads_of(model), expected(usage, 2, step), rtol=1e-10, atol=1e-12)
                model.zero_grad()

    run_ranks(work, 2)


def test_forced_sync_without_a_search():
    def work(rank):
        for usage in USAGES:
            model = torchddp.DDP(make_branches())
            for step in range(2):
                run_step(model, rank, usage, FORCED, step)
                want = with_zeros(expected(usage, 3, step), model.module)
                assert_same(grads_of(model), want, rtol=1e-10, atol=1e-12)
                assert_equal_on_all_ranks(model)
                model.zero_grad(set_to_none=step == 0)

    run_ranks(work, 3)


def test_a_rank_that_used_nothing_at_all():
    def work(rank):
        model = torchddp.DDP(make_branches(), find_unused_parameters=True)
        for micro in accumulate(model, 2, FORCED):
            if rank != 1:
                backward(model, rank, micro, "left")
        usage = [["left", "left"], [], ["left", "left"]]
        assert_same(grads_of(model), expected(usage, 3), rtol=1e-10, atol=1e-12)
        assert_equal_on_all_ranks(model)

    run_ranks(work, 3)


def test_gradients_nobody_touched_keep_their_bits():
    # Three ranks: a third of three times a value is not always the value.
    def work(rank):
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

    run_ranks(work, 3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_reduction_gives_the_same_bits_in_backward_and_after_it(world_size):
    def work(rank):
        grads = []
        for strategy in (SINGLE, FORCED):
            model = torchddp.DDP(seeded(lambda: Mlp(dtype=torch.float32)), transport="shm")
            for step in range(3):
                for micro in accumulate(model, 3, strategy):
                    loss_of(model(batch(rank, 3 * step + micro, dtype=torch.float32))).backward()
            grads.append(grads_of(model))
        assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])

    run_ranks(work, world_size)


def test_how_often_gradients_are_reduced():
    def work(rank):
        for strategy, times in ((SINGLE, 1), (MULTI, 4), (FORCED, 1), (None, 1)):
            calls = []

            def hook(state, bucket, calls=calls):
                calls.append(bucket.index())
                return allreduce_hook(None, bucket)

            model = torchddp.DDP(seeded(Mlp), comm_hook=hook)
            for step in range(2):
                for micro in accumulate(model, 4, strategy):
                    step_on(model, rank, 4 * step + micro)
            assert model.reducer._stats()["finished"] == 2 * times
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
        assert model.reducer._stats()["finished"] == 3
        assert copy.deepcopy(model).sync_strategy is MULTI

    run_ranks(work, 2)


def test_fp16_hook_after_backward_rounds_as_in_backward():
    def work(rank):
        grads = []
        for strategy in (SINGLE, FORCED):
            model = torchddp.DDP(seeded(lambda: Mlp(dtype=torch.float32)), comm_hook=(None, fp16_compress_hook))
            for micro in accumulate(model, 2, strategy):
                loss_of(model(batch(rank, micro, dtype=torch.float32))).backward()
            grads.append(grads_of(model))
        assert_same(grads[1], grads[0], rtol=0, atol=0)
        assert_equal_on_all_ranks(model)

    run_ranks(work, 2)


def test_frozen_parameters():
    def work(rank):
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

    run_ranks(work, 2)


def test_static_graphs():
    def work(rank):
        usage = [["left", "left"]] * 2
        model = torchddp.DDP(make_branches(), static_graph=True, find_unused_parameters=True)
        for step, strategy in enumerate((FORCED, FORCED, SINGLE, FORCED, SINGLE)):
            run_step(model, rank, usage, strategy, step)
            assert_same(grads_of(model), expected(usage, 2, step), rtol=1e-10, atol=1e-12)
            model.zero_grad()

    run_ranks(work, 2)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, ids):
        return self.head(self.table(ids))


def test_sparse_gradients():
    def work(rank):
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

    run_ranks(work, 2)


def test_decoupled_with_an_optimizer_that_updates_later():
    def work(rank):
        trained = []
        for decoupled in (True, False):
            model = torchddp.DDP(seeded(Mlp), decoupled=decoupled, transport="c10d", sync=FORCED)
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            optimizer = DeferredOptimizer(optimizer, model) if decoupled else optimizer
            for step in range(4):
                for micro in accumulate(model, 2):
                    step_on(model, rank, 2 * step + micro)
                optimizer.step()
                optimizer.zero_grad()
            trained.append(model.state_dict())
        for name, value in trained[0].items():
            assert torch.equal(value, trained[1][name]), name

    run_ranks(work, 2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_gradients(world_size):
    def work(rank):
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

    run_ranks(work, world_size)


def test_loops_left_early():
    def work(rank):
        model = torchddp.DDP(seeded(Mlp))

        def leave(strategy, at, how):
            model.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    for micro in accumulate(model, 3, strategy):
                        step_on(model, rank, micro)
                        if micro == at and how == "break":
                            break
                        if micro == at:
                            raise KeyError("of the user's")
                except KeyError as error:
                    assert how != "break" and "of the user's" in str(error)
            assert model.require_backward_grad_sync
            texts = [str(w.message) for w in caught if "accumulate" in str(w.message)]
            assert all(f"left in microbatch {at} of 0 to 2: with {strategy.name}" in text for text in texts)
            return len(texts)

        for how in ("break", "raise"):
            assert leave(SINGLE, 1, how) == 1
            assert leave(SINGLE, 2, how) == 0  # reduced by then
            assert leave(FORCED, 1, how) == 1
            assert leave(FORCED, 2, how) == 1
            assert leave(MULTI, 1, how) == 0
        # And the model goes on.
        model.zero_grad()
        for micro in accumulate(model, 2, FORCED):
            step_on(model, rank, micro)
        assert_equal_on_all_ranks(model)

    run_ranks(work, 2)


def test_a_body_that_raises_reduces_nothing():
    def work(rank):
        model = torchddp.DDP(seeded(Mlp))
        with pytest.raises(KeyError), sync_context(model, True, FORCED):
            step_on(model, rank)
            raise KeyError
        assert model.require_backward_grad_sync
        assert model.reducer._stats()["finished"] == 0

    run_ranks(work, 1)


def test_an_outer_no_sync_wins():
    def work(rank):
        for strategy in (SINGLE, MULTI, FORCED):
            model = torchddp.DDP(seeded(Mlp))
            with model.no_sync():
                for micro in accumulate(model, 2, strategy):
                    step_on(model, rank, micro)
                assert not model.require_backward_grad_sync
            assert model.reducer._stats()["finished"] == 0
            plain = seeded(Mlp)
            for micro in range(2):
                step_on(plain, rank, micro)
            assert_same(grads_of(model), grads_of(plain))

    run_ranks(work, 2)


def test_gradients_that_would_be_dropped():
    def work(rank):
        # torch knows indices only, unless it is asked for more.
        for ddp_class, missing in ((torchddp.DDP, r"left\.weight, left\.bias"), (TorchDDP, "2 3 6 7")):
            model = ddp_class(make_branches())
            with pytest.raises(
                RuntimeError, match=rf"last microbatch .* SINGLE_AUTO_SYNC .*FORCED_SYNC[\s\S]*{missing}"
            ):
                run_step(model, rank, [["left", "right"]] * 2)
        model = torchddp.DDP(seeded(Mlp))
        with pytest.warns(UserWarning, match="ended without a backward"):
            for micro in accumulate(model, 2):
                output = model(batch(rank, micro))
                if micro == 0:
                    loss_of(output).backward()
        # A further forward after backward leaves nothing unreduced.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for micro in accumulate(model, 2):
                step_on(model, rank, micro)
                model(batch(rank, micro))

    run_ranks(work, 2)


def test_modes_that_exclude_it():
    def work(rank):
        model = torchddp.DDP(seeded(Mlp))
        with model.join(), pytest.raises(RuntimeError, match=rf"on rank {rank}: under join\(\).*SINGLE_AUTO_SYNC"):
            run_nothing(model)
        delayed = seeded(Mlp)
        named = [("last.weight", delayed.last.weight)]
        model = torchddp.DDP(
            delayed, delay_all_reduce_named_params=named, param_to_hook_all_reduce=delayed.first.weight
        )
        with pytest.raises(RuntimeError, match="delay_all_reduce_named_params"):
            run_nothing(model)

    def run_nothing(model):
        with sync_context(model, True, FORCED):
            raise AssertionError("refused before the body")

    run_ranks(work, 2)


def test_planned_buckets_stay_as_they_are():
    def work(rank):
        model = torchddp.DDP(seeded(Mlp), bucket_cap_mb="auto", transport="c10d")
        for step in range(10):
            for micro in accumulate(model, 2, FORCED):
                step_on(model, rank, 2 * step + micro)
        assert model._auto_plan is None
        assert_equal_on_all_ranks(model)

    run_ranks(work, 2)


def test_a_rank_that_does_not_come():
    def work(rank):
        model = torchddp.DDP(seeded(Mlp), timeout=timedelta(seconds=1))
        if rank == 1:
            dist.barrier()
            return
        with model.no_sync():
            step_on(model, rank)
        with pytest.raises(torchddp.TransportError, match=r"rank 0, step \d+: the reduction of bucket 0"):
            model.reduce()
        dist.barrier()

    run_ranks(work, 2)


def test_hooks_as_arguments():
    class Attached:
        """What torchddp's own hooks are, as far as the wrapper is concerned."""

        def __init__(self):
            self.models = []

        def attach(self, model):
            dist.barrier()
            self.models.append(model)

        def __call__(self, state, bucket: dist.GradBucket):
            return allreduce_hook(None, bucket)

    def work(rank):
        hook = Attached()
        model = torchddp.DDP(seeded(Mlp), comm_hook=hook)
        assert hook.models == [model]
        step_on(model, rank)
        other = torchddp.DDP(seeded(Mlp))
        state = object()
        other.register_comm_hook(state, hook)
        assert hook.models == [model, other] and other._comm_hooks == [(hook, state)]
        step_on(other, rank)
        assert_same(grads_of(model), grads_of(other), rtol=0, atol=0)
        with pytest.raises(TypeError, match="comm_hook must be"):
            torchddp.DDP(seeded(Mlp), comm_hook=3)
        with pytest.raises(RuntimeError, match="decoupled=True takes no communication hook"):
            torchddp.DDP(seeded(Mlp), comm_hook=hook, decoupled=True)
        with pytest.raises(ValueError, match="unknown sync strategy 'never': .*'single_auto_sync'"):
            torchddp.DDP(seeded(Mlp), sync="never")

    run_ranks(work, 2)


def test_compiled_modules():
    def work(rank):
        model = torchddp.DDP(seeded(Mlp))
        compiled = torch.compile(model, backend="eager")
        with sync_context(compiled, False):
            assert not model.require_backward_grad_sync
        with sync_context(compiled, True):
            assert model.require_backward_grad_sync

    run_ranks(work, 1)


def test_the_examples_of_the_documentation():
    page = (Path(__file__).resolve().parents[2] / "docs" / "sync.md").read_text()
    indented = re.findall(r"(?:^(?: {4}.*)?\n)+", page, re.MULTILINE)
    blocks = [textwrap.dedent(block) for block in indented if block.strip()]
    assert len(blocks) == 3

    def work(rank):
        module = seeded(lambda: Mlp(dtype=torch.float32))
        data = [batch(rank, micro, dtype=torch.float32) for micro in range(3)]
        names = {
            "module": module,
            "steps": [data, data],
            "microbatches": data,
            "loss_of": loss_of,
            "optimizer": torch.optim.SGD(module.parameters(), 0.01),
            "bf16_compress_hook": bf16_compress_hook,
        }
        for block in blocks:
            exec(block, names)
            assert_equal_on_all_ranks(names["model"])

    run_ranks(work, 2)


def test_prepared_modules():
    def work(rank):
        model = prepare_ddp_module(seeded(Mlp), find_unused_parameters=True, bucket_cap_mb=3)
        assert type(model) is torchddp.DDP and model.find_unused_parameters
        frozen = seeded(Mlp).requires_grad_(False)
        assert prepare_ddp_module(frozen, False) is frozen

    run_ranks(work, 2)
