"""Loops over microbatches that end early or go wrong, what is refused, and the arguments `comm_hook=` and `sync=`."""

import re
import textwrap
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import on_ranks
from tests.microbatches import FORCED, MULTI, SINGLE, assert_equal_on_all_ranks, assert_same, make_branches, run_step
from tests.models import Mlp, batch, grads_of, loss_of, seeded, step_on
from torchddp.comm_hooks import FP16
from torchddp.sync import accumulate, prepare_ddp_module, sync_context


@on_ranks(2)
def test_loops_left_early(rank):
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


@on_ranks(1)
def test_bodies_that_raise_and_compiled_modules(rank):
    # A body that raises reduces nothing.
    model = torchddp.DDP(seeded(Mlp))
    with pytest.raises(KeyError), sync_context(model, True, FORCED):
        step_on(model, rank)
        raise KeyError
    assert model.require_backward_grad_sync
    assert model.reducer.stats()["finished"] == 0

    # Compiled modules.
    model = torchddp.DDP(seeded(Mlp))
    compiled = torch.compile(model, backend="eager")
    with sync_context(compiled, False):
        assert not model.require_backward_grad_sync
    with sync_context(compiled, True):
        assert model.require_backward_grad_sync


@on_ranks(2)
def test_loops_that_reduce_nothing_and_planned_buckets(rank):
    # An outer no sync wins.
    for strategy in (SINGLE, MULTI, FORCED):
        model = torchddp.DDP(seeded(Mlp))
        with model.no_sync():
            for micro in accumulate(model, 2, strategy):
                step_on(model, rank, micro)
            assert not model.require_backward_grad_sync
        assert model.reducer.stats()["finished"] == 0
        plain = seeded(Mlp)
        for micro in range(2):
            step_on(plain, rank, micro)
        assert_same(grads_of(model), grads_of(plain))

    # Planned buckets stay as they are.
    model = torchddp.DDP(seeded(Mlp), bucket_cap_mb="auto", transport="c10d")
    for step in range(10):
        for micro in accumulate(model, 2, FORCED):
            step_on(model, rank, 2 * step + micro)
    assert not model.observers.get("bucket_planning").is_under_way
    assert_equal_on_all_ranks(model)


@on_ranks(2)
def test_gradients_that_would_be_dropped(rank):
    # torch knows indices only, unless it is asked for more.
    for ddp_class, missing in ((torchddp.DDP, r"left\.weight, left\.bias"), (TorchDDP, "2 3 6 7")):
        model = ddp_class(make_branches())
        with pytest.raises(RuntimeError, match=rf"last microbatch .* SINGLE_AUTO_SYNC .*FORCED_SYNC[\s\S]*{missing}"):
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
        warnings.simplefilter("ignore", torchddp.UsageWarning)  # of the forward before, which had no backward
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
    for first in (3, 1):  # with all that are trained torch makes no reducer
        delayed = seeded(Mlp)
        parameters = list(delayed.named_parameters())
        for _, parameter in parameters[:first] if first == 1 else ():
            parameter.requires_grad = False
        model = torchddp.DDP(
            delayed, delay_all_reduce_named_params=parameters[first:], param_to_hook_all_reduce=parameters[-1][1]
        )
        assert ("session" in vars(model)) == (first == 3)
        with pytest.raises(RuntimeError, match="delay_all_reduce_named_params"):
            run_nothing(model)


@on_ranks(2)
def test_a_rank_that_does_not_come(rank):
    model = torchddp.DDP(seeded(Mlp), timeout=timedelta(seconds=1))
    if rank == 1:
        dist.barrier()
        return
    with model.no_sync():
        step_on(model, rank)
    with pytest.raises(torchddp.TransportError, match=r"rank 0, step \d+: the reduction of bucket 0"):
        model.reduce()
    dist.barrier()


@on_ranks(2)
def test_arguments(rank):
    # Hooks as arguments.
    class Attached(FP16):
        models: tuple = ()

        def attach(self, model):
            super().attach(model)
            self.models += (model,)

    hook, another = Attached(), Attached()
    model = torchddp.DDP(seeded(Mlp).float(), comm_hook=hook)
    assert hook.models == (model,)
    model(torch.full((4, 8), 1.0 + rank)).sum().backward()
    other = torchddp.DDP(seeded(Mlp).float())
    state = object()
    other.register_comm_hook(state, another)
    assert another.models == (other,) and other._comm_hooks == [(another, state)]
    other(torch.full((4, 8), 1.0 + rank)).sum().backward()
    assert_same(grads_of(model), grads_of(other), rtol=0, atol=0)
    plain = torchddp.DDP(seeded(Mlp).float(), comm_hook=(None, allreduce_hook))
    plain(torch.full((4, 8), 1.0 + rank)).sum().backward()
    assert_same(grads_of(model), grads_of(plain), rtol=1e-2, atol=1e-4)
    with pytest.raises(TypeError, match="comm_hook must be"):
        torchddp.DDP(seeded(Mlp), comm_hook=3)
    with pytest.raises(ValueError, match="unknown sync strategy 'never': .*'single_auto_sync'"):
        torchddp.DDP(seeded(Mlp), sync="never")

    # Prepared modules.
    model = prepare_ddp_module(seeded(Mlp), find_unused_parameters=True, bucket_cap_mb=3)
    assert type(model) is torchddp.DDP and model.find_unused_parameters
    frozen = seeded(Mlp).requires_grad_(False)
    assert prepare_ddp_module(frozen, False) is frozen


@on_ranks(2)
def test_the_examples_of_the_documentation(rank):
    page = (Path(__file__).resolve().parents[2] / "docs" / "sync.md").read_text()

    indented = re.findall(r"(?:^(?: {4}.*)?\n)+", page, re.MULTILINE)

    blocks = [textwrap.dedent(block) for block in indented if block.strip()]

    assert len(blocks) == 4

    module = seeded(lambda: Mlp(dtype=torch.float32))
    data = [batch(rank, micro, dtype=torch.float32) for micro in range(3)]
    names = {
        "module": module,
        "steps": [data, data],
        "microbatches": data,
        "loader": data[: 2 + rank],
        "loss_of": loss_of,
        "optimizer": torch.optim.SGD(module.parameters(), 0.01),
        "bf16_compress_hook": bf16_compress_hook,
    }
    for block in blocks:
        exec(block, names)
        assert_equal_on_all_ranks(names["model"])
