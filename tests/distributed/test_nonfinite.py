"""Checks(nonfinite=) traces NaNs and infinities to their rank, parameters and step; gradient_stats counts them."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import assert_each_raises, each, gathered, logged, on_ranks, over_both
from tests.models import Branches, Mlp, batch, grads_of, loss_of, seeded, step_on
from tests.unit.helpers import wait_until
from tests.whole_buckets import WholeBuckets
from torchddp import DDP, Checks
from torchddp.diagnose.nonfinite import NonFinite

UPSTREAM = ["first.bias", "first.weight", "middle.bias", "middle.weight"]


def spoil_gradient(layer, value, here=True):
    """From now on, or within the context, the gradient of the layer's output has one such value."""

    def spoil(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    if not here:
        return contextlib.nullcontext()
    return layer.register_forward_hook(lambda module, inputs, output: output.register_hook(spoil) and None)


def run_step(ddp, rank, step, dtype=torch.float64):
    ddp.zero_grad()
    loss_of(ddp(batch(rank, step, dtype=dtype))).backward()


def found_on_all(ddp):
    """Each rank's findings after all have published theirs (collective)."""
    ddp.nonfinite()
    dist.barrier()
    found = ddp.nonfinite()
    assert gathered(found) == [found] * dist.get_world_size()
    return found


@over_both
@on_ranks(1, 3)
def test_rank_step_and_parameters_upstream_are_named(rank, world_size, transport):
    bad = min(1, world_size - 1)
    options = {"bucket_cap_mb": 0.001, "transport": "auto" if world_size == 1 else transport}
    ddp = DDP(seeded(Mlp), checks=Checks(nonfinite=True), **options)
    for step in (1, 2):
        run_step(ddp, rank, step)
    assert found_on_all(ddp) == []
    with spoil_gradient(ddp.module.middle, math.nan, rank == bad):
        run_step(ddp, rank, 3)
    found = found_on_all(ddp)
    assert {(one.step, one.rank) for one in found} == {(3, bad)}
    assert sorted(one.parameter for one in found) == UPSTREAM
    counts = {one.parameter: one.count for one in found}
    # Row 0 of the middle layer; in the first layer, all elements, through one row of the batch.
    assert counts == {"middle.bias": 1, "middle.weight": 16, "first.bias": 16, "first.weight": 128}
    assert ddp.module.last.weight.grad.isfinite().all() and not ddp.module.middle.bias.grad[0].isfinite()
    for step in (4, 5):
        run_step(ddp, rank, step)
    assert found_on_all(ddp) == found
    if rank == 0:
        ddp.module.middle.register_forward_hook(lambda module, inputs, output: output * math.nan)
    run_step(ddp, rank, 6)
    again = found_on_all(ddp)
    mine = [one for one in again if one.rank == 0]
    assert {one.step for one in mine} == {6} and {"last.weight"} <= {one.parameter for one in mine}
    assert [one for one in again if one.rank != 0] == ([] if bad == 0 else found)


def wide():
    """Layers whose gradients have their own buckets and are not copied."""
    module = Mlp(8, torch.float32)
    module.first, module.middle = nn.Linear(8, 512), nn.Linear(512, 600)
    module.last = nn.Linear(600, 8, bias=False)
    return module


def expected_counts(ddp):
    """Counts in the averages, which here are non-finite exactly where one rank's gradient is."""
    grads = {name: torch.view_as_real(g) if g.is_complex() else g for name, g in grads_of(ddp).items()}
    return {name: int((~grad.isfinite()).sum()) for name, grad in grads.items() if not grad.isfinite().all()}


@pytest.mark.usefixtures("cheap_messages")
@pytest.mark.parametrize(("transport", "world_size"), [("shm", 3), ("c10d", 2)])
@on_ranks()
def test_gradients_that_are_not_copied(rank, transport):
    """Over shared memory the summing rank counts them; elsewhere a separate pass does."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ddp = DDP(seeded(wide), checks=Checks(nonfinite=True), transport=transport)
        assert 1 in [len(bucket.params) for bucket in ddp.reducer.plan.buckets]
        for step in (1, 2):
            run_step(ddp, rank, step, torch.float32)
        with spoil_gradient(ddp.module.middle, -math.inf, rank == 1):
            run_step(ddp, rank, 3, torch.float32)
        found = found_on_all(ddp)
        assert {one.parameter: one.count for one in found} == expected_counts(ddp), threads
        assert sorted(one.parameter for one in found) == UPSTREAM and {(o.step, o.rank) for o in found} == {(3, 1)}
        with ddp.no_sync():  # accumulated in the bucket
            run_step(ddp, rank, 5, torch.float32)
        if rank == 0:
            ddp.module.middle.weight.grad[3, 3] = math.nan
        loss_of(ddp(batch(rank, 6, dtype=torch.float32))).backward()
        assert [one for one in found_on_all(ddp) if one.rank == 0] == [NonFinite(4, 0, "middle.weight", 1)]


class Given(nn.Module):
    """The gradients of some parameters are the inputs; the others' are ones in another memory layout."""

    def __init__(self, dtype=torch.float32, **shapes):
        super().__init__()
        self.p = nn.ParameterDict({name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()})

    def forward(self, factors):
        rest = sum(p.t().contiguous().sum() for name, p in self.p.items() if name not in factors)
        return (sum((self.p[name] * factor).sum() for name, factor in factors.items()) + rest).real.float()


@on_ranks(2)
def test_dtypes_layouts_and_other_modes(rank):
    # Dtypes, copies and layouts.
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.complex64)
    for dtype, views in each(dtypes, [True, False]):
        options = {"checks": Checks(nonfinite=True), "gradient_as_bucket_view": views, "transport": "c10d"}
        ddp = DDP(Given(dtype, a=(3, 70), b=(4, 5)), **options)
        factor = torch.ones(3, 70, dtype=dtype)
        ddp({"a": factor}).backward()
        assert found_on_all(ddp) == []
        if rank == 0:
            factor[1, 3:5] = math.nan
        ddp.zero_grad()
        ddp({"a": factor}).backward()
        counts = expected_counts(ddp)
        assert {one.parameter: one.count for one in found_on_all(ddp)} == counts
        assert counts.keys() == {"p.a"} and counts["p.a"] in (2, 4)

    # Like devices, which report later and without counts. Unused parameters, a static graph, sparse gradients, copies.
    copies, static = {"gradient_as_bucket_view": False}, {"static_graph": True}
    for cls, options in ((WholeBuckets, {}), (WholeBuckets, copies), (DDP, static)):
        ddp = cls(seeded(Mlp), checks=Checks(nonfinite=True), **options)
        if rank == 1:
            spoil_gradient(ddp.module.middle, math.nan)
        for step in (1, 2):
            run_step(ddp, rank, step)
        found = found_on_all(ddp)
        assert sorted(one.parameter for one in found) == UPSTREAM and {(o.step, o.rank) for o in found} == {(1, 1)}
        assert (found[0].count is None) == (cls is WholeBuckets)
        other = copy.deepcopy(ddp)
        run_step(other, rank, 1)
        assert [one.rank for one in other.nonfinite()] == ([1] * 4 if rank == 1 else [])

    ddp = DDP(seeded(Branches), find_unused_parameters=True, checks=Checks(nonfinite=True))
    if rank == 0:
        spoil_gradient(ddp.module.left, math.inf)
    loss_of(ddp(batch(rank, 0, 2, 4), "left" if rank == 0 else "right")).backward()
    assert {o.parameter for o in found_on_all(ddp)} == {"left.weight", "left.bias", "trunk.weight", "trunk.bias"}

    ddp = DDP(nn.Embedding(5, 3, sparse=True), checks=Checks(nonfinite=True))
    factor = torch.tensor([[1.0, 1.0, math.nan if rank == 1 else 1.0]])
    (ddp(torch.tensor([2])) * factor).sum().backward()
    assert found_on_all(ddp) == [NonFinite(1, 1, "weight", 1)]


@on_ranks(2)
def test_a_grad_scaler_recovers_and_each_overflow_is_an_episode(rank):
    ddp = DDP(seeded(lambda: Mlp(dtype=torch.float32)), checks=Checks(nonfinite=True))
    optimizer = torch.optim.SGD(ddp.parameters(), 1e-7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    for step in range(1, 30):
        optimizer.zero_grad()
        scaler.scale(1000 * loss_of(ddp(batch(rank, step, dtype=torch.float32)))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(p.isfinite().all() for p in ddp.parameters()) and scaler.get_scale() < 2.0**127
    assert found_on_all(ddp)[0].step == 1
    ddp.module.first.weight.data[0, 0] = math.nan
    run_step(ddp, rank, 30, torch.float32)
    assert {one.step for one in found_on_all(ddp)} == {30}


@on_ranks(3)
def test_the_culprit_warns_once_and_rank_0_reports_all(rank):
    lines = logged("torchddp.distributed")
    ddp = DDP(seeded(Mlp), checks=Checks(nonfinite=True))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(1, 7):
        if step == 3 and rank in (1, 2):
            spoil_gradient([None, ddp.module.first, ddp.module.middle][rank], math.nan)
        run_step(ddp, rank, step)
        optimizer.step()  # from now on the weights of all ranks are NaN
    found = found_on_all(ddp)
    assert {(one.step, one.rank) for one in found if one.step == 3} == {(3, 1), (3, 2)}
    assert found[0].step == 3 and {one.rank for one in found} == {0, 1, 2}
    own = [line for line in lines if line.startswith(f"rank {rank}, step")]
    assert len(own) == 1 and f"step {3 if rank else 4}: " in own[0]
    assert own[0].count(" value") == [5, 2, 4][rank] + 1
    assert rank > 0 or wait_until(lambda: any(line.startswith("Infinite") for line in lines))
    dist.barrier()
    told = gathered([line for line in lines if line.startswith("Infinite")])
    assert told[1:] == [[], []]
    (line,) = told[0]
    assert "began in step 3. rank 1: 'first" in line and "; rank 2: '" in line and "on rank 0" in line


@pytest.mark.parametrize(("cls", "transport"), [(DDP, "shm"), (DDP, "c10d"), (WholeBuckets, "c10d")])
@on_ranks(3)
def test_raise_on_all_ranks_at_the_end_of_that_backward(rank, cls, transport):
    ddp = cls(seeded(Mlp), checks=Checks(nonfinite="raise"), transport=transport, bucket_cap_mb=0.001)
    run_step(ddp, rank, 1)
    with spoil_gradient(ddp.module.middle, math.nan, rank == 1), pytest.raises(FloatingPointError) as info:
        run_step(ddp, rank, 2)
    text = str(info.value)
    for words in (f"rank {rank}, step 2:", "of 4 parameters are infinite or NaN", "'first.bias'", "zero_grad"):
        assert words in text
    assert "'last.weight'" not in text
    assert ("own gradients were not finite for 4" in text) == (rank == 1)
    assert ("own gradients were finite" in text) == (rank != 1)
    assert {(one.step, one.rank) for one in found_on_all(ddp)} == {(2, 1)}
    for step in (3, 4):  # training continues
        run_step(ddp, rank, step)
    assert all(p.grad.isfinite().all() for p in ddp.parameters())
    with ddp.no_sync():
        run_step(ddp, rank, 5)
    if rank == 0:
        ddp.module.first.bias.grad[0] = math.inf
    with pytest.raises(FloatingPointError, match=r"of 1 parameter .*'first\.bias'"):
        ddp.reduce()


SIZES = {"large": 300_000, "a": 5_000, "b": 6_000}


@over_both
@on_ranks(3)
def test_large_averages_are_checked_on_all_ranks(rank, transport):
    """Over shared memory the summing rank checks each shard. All ranks raise, only in that step.

    One parameter has its own bucket, and two share one.
    """
    ddp = DDP(Given(**SIZES), checks=Checks(nonfinite="raise"), transport=transport)

    def step(name="", place=0, culprit=0, value=math.nan):
        ddp.zero_grad()
        factors = {key: torch.full((size,), 1.0 + rank) for key, size in SIZES.items()}
        if name and rank == culprit:
            factors[name][place] = value
        ddp(factors).backward()

    step()
    for turn, (name, size) in enumerate(SIZES.items()):
        for place in (0, size // 2, size - 1):
            value = math.nan if turn % 2 else math.inf
            with pytest.raises(FloatingPointError, match=rf"of 1 parameter .*'p\.{name}'") as info:
                step(name, place, place % 3, value)
            assert ("own gradients were finite" in str(info.value)) == (rank != place % 3)
            step()
            assert all((p.grad == 2).all() for p in ddp.parameters())


@on_ranks(2)
def test_a_sum_that_overflows_and_bad_arguments(rank):
    # A sum that overflows also raises.
    def sum_hook(state, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    ddp = DDP(Given(torch.float16, a=4), checks=Checks(nonfinite="raise"), transport="c10d")
    ddp.register_comm_hook(None, sum_hook)
    with pytest.raises(FloatingPointError, match=r"own gradients were finite: .* or the sum overflowed"):
        ddp({"a": torch.full((4,), 4e4, dtype=torch.float16)}).backward()
    assert found_on_all(ddp) == []

    # What is refused.
    assert_each_raises(
        (lambda: DDP(seeded(Mlp), checks=Checks(nonfinite="all")), ValueError, 'must be False, True or "raise"'),
        (lambda: DDP(seeded(Mlp)).nonfinite(), RuntimeError, "with Checks(nonfinite=True)"),
    )


@on_ranks(3)
def test_another_group_has_its_own_board(rank):
    ddp = DDP(seeded(Mlp), checks=Checks(nonfinite=True), transport="c10d")
    run_step(ddp, rank, 1)
    group = dist.new_group([0, 1])
    if rank == 2:
        return
    ddp.update_process_group(group)
    if rank == 1:
        spoil_gradient(ddp.module.middle, math.nan)
    run_step(ddp, rank, 2)
    ddp.nonfinite()
    dist.barrier(group)
    assert {(one.step, one.rank) for one in ddp.nonfinite()} == {(2, 1)}


@on_ranks(2)
def test_one_bad_value_on_one_rank_is_counted_on_all(rank):
    for ddp_class, value in each([DDP, WholeBuckets], [math.inf, math.nan]):
        ddp = ddp_class(seeded(Mlp), checks=Checks(gradient_stats=True))
        weight = ddp.module.last.weight
        rows = torch.arange(rank)
        handle = weight.register_hook(lambda g, rows=rows, value=value: g.index_fill(0, rows, value))
        step_on(ddp, rank)
        squares, bad = ddp.gradient_stats().sum(0).tolist()
        assert bad == weight.shape[1] and not math.isfinite(squares)
        handle.remove()
        ddp.zero_grad()
        step_on(ddp, rank)
        assert ddp.gradient_stats()[:, 1].sum() == 0
    with pytest.raises(RuntimeError, match="gradient_stats=True"):
        DDP(seeded(Mlp)).gradient_stats()


@on_ranks(1)
def test_squares_of_extreme_values_are_summed_in_double(rank):
    extremes = [(torch.float64, 1e150), (torch.float16, 6e4)]
    extremes += [(dtype, 3e38) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
    for dtype, value in extremes:
        ddp = DDP(Given(dtype, a=2000), checks=Checks(gradient_stats=True))
        ddp({"a": torch.full([2000], value, dtype=dtype)}).backward()
        exact = abs(torch.tensor(value, dtype=dtype).item()) ** 2 * 2000
        assert ddp.gradient_stats()[0].tolist() == [pytest.approx(exact, rel=1e-12), 0], dtype
