"""Errors of torchddp.averaging, which name parameter and rank; and ranks that take fewer steps."""

import re
import signal

import pytest
import torch

from tests.averaging import make_net, sgd, train
from tests.harness import assert_each_raises, on_ranks, run_outcomes
from tests.oss import weights
from torchddp.averaging import DiLoCo, HierarchicalAverager, PeriodicAverager, PostLocalSGD
from torchddp.optim import OSS


def test_without_a_process_group():
    for make in (OSS, lambda params: PeriodicAverager(params, 1)):
        assert_each_raises((lambda make=make: make(weights(2)), RuntimeError, "init_process_group first"))


@on_ranks(2)
def test_averagers(rank):
    net = make_net()
    gaps = torch.nn.Parameter(torch.ones(4, 6)[:, :3])

    def periodic(params=net, period=1, **options):
        return lambda: PeriodicAverager(params, period, **options)

    def hierarchical(periods):
        return lambda: HierarchicalAverager(net, periods)

    assert_each_raises(
        (periodic(period=0), ValueError, "period must be at least 1 step, got 0"),
        (periodic(warmup_steps=-1), ValueError, "warmup_steps must be at least 0, got -1"),
        (periodic(bucket_cap_mb=0), ValueError, "bucket_cap_mb must be above 0, got 0"),
        (periodic([]), ValueError, "there is no parameter to average"),
        (periodic([("gaps", gaps)]), ValueError, "parameter 'gaps' (shape [4, 3], strides [6, 1]) leaves gaps"),
        (periodic(["weight"]), TypeError, "params[0] must be a parameter, got str"),
        (periodic(net.embed.weight), TypeError, "got a tensor"),
        (periodic(list(net.parameters()), buffers=True), TypeError, "buffers=True needs a module as params, got list"),
        (hierarchical({}), ValueError, "periods must not be empty"),
        (hierarchical({0: 2}), ValueError, "periods must be at least 1 step, got 0"),
        (hierarchical({4: 1, 2: 2}), ValueError, "periods must ascend, got {4: 1, 2: 2}"),
        (hierarchical({2: 2, 4: 2}), ValueError, "group sizes must grow with their periods, got {2: 2, 4: 2}"),
        (hierarchical({2: 1}), ValueError, "the last group must be all 2 ranks"),
        (lambda: PostLocalSGD(sgd(net.parameters()), 4), TypeError, "averager must be a PeriodicAverager"),
        (lambda: PostLocalSGD(net, periodic()()), TypeError, "PostLocalSGD needs a torch.optim.Optimizer, got Net"),
    )


@on_ranks(2)
def test_optimizers(rank):
    net = make_net()
    inner, few = sgd(net.parameters()), weights(2, 3)
    oss = OSS(weights(2, 3), torch.optim.SGD, lr=0.1)
    done = DiLoCo(net, inner, 2)
    wide = [("wide", *weights(3, dtype=torch.float64))]
    spin = [("spin", *weights(3, dtype=torch.complex64))]

    def diloco(params=net, optimizer=inner, every=2, **options):
        return lambda: DiLoCo(params, optimizer, every, **options)

    def in_fragments(every=8, fragments=2, **options):
        return lambda: DiLoCo(few, sgd(few), every, fragments=fragments, **options)

    only = "wire='int8' carries float32, bfloat16 and float16, but parameter 'wide' is torch.float64"
    assert_each_raises(
        (diloco(optimizer=oss), ValueError, "DiLoCo can't wrap OSS, whose steps are collective"),
        (diloco(every=0), ValueError, "sync_every must be at least 1 step, got 0"),
        (diloco(outer_lr=0.0), ValueError, "outer_lr must be above 0, got 0.0"),
        (diloco(outer_momentum=1.0), ValueError, "outer_momentum must be at least 0 and below 1, got 1.0"),
        (diloco(outer_optimizer=inner), TypeError, "outer_optimizer must be a function, which gets"),
        (diloco(outer_optimizer=lambda p: p), TypeError, "outer_optimizer must return an optimizer, got list"),
        (diloco(wire="int2"), ValueError, "one of 'fp32', 'bf16', 'fp16', 'int8', 'int4', got 'int2'"),
        (diloco(net.blocks), ValueError, "the optimizer steps params[1] (shape [20, 12]), which is not among"),
        (lambda: done.add_param_group({"params": few}), RuntimeError, "DiLoCo can't add parameters"),
        (lambda: done.load_state_dict(inner.state_dict()), ValueError, "the state dict has no 'diloco'"),
        (lambda: done.__getstate__(), TypeError, "DiLoCo can't be copied or pickled"),
        (diloco(wide, sgd([p for _, p in wide]), wire="int8"), TypeError, only),
        (diloco(spin, sgd([p for _, p in spin])), TypeError, "parameter 'spin' is torch.complex64"),
        (in_fragments(fragments=3), ValueError, "at most 2, the number of parameters, got 3"),
        (in_fragments(1), ValueError, "fragments must be at most sync_every=1"),
        (in_fragments(overlap_steps=4), ValueError, "below sync_every // fragments = 4, so that one fragment is in"),
        (in_fragments(overlap_steps=-1), ValueError, "got -1"),
        (in_fragments(alpha=1.0), ValueError, "alpha must be at least 0 and below 1"),
    )


@on_ranks(3)
def test_models_and_options_that_differ_between_ranks(rank):
    net, shapes = make_net(), list(zip("ab", weights(4, 3 + rank // 2), strict=True))
    odd = 0.5 if rank == 1 else 0.7

    def diloco(every, **options):
        return lambda: DiLoCo(net, sgd(net.parameters()), every, **options)

    same = "PeriodicAverager needs the same parameters on all ranks. On rank 2 it is 'b'"
    assert_each_raises(
        (lambda: PeriodicAverager(shapes, 1), RuntimeError, same),
        (diloco(4 + rank // 2), RuntimeError, "On rank 2 it is sync_every=5"),
        (diloco(4, outer_lr=odd), RuntimeError, "On rank 1 it is sync_every=4, outer_lr=0.5"),
    )


BUCKET, FRAGMENT = "could not average bucket 0 of 1", "could not average fragment 0 of 1"
METHODS = {
    "periodic": (lambda net, inner: PostLocalSGD(inner, PeriodicAverager(net, 2)), f"PeriodicAverager {BUCKET}", 4),
    "overlapped": (lambda net, inner: DiLoCo(net, inner, 2, overlap_steps=1), f"DiLoCo {FRAGMENT}", 5),
    "diloco": (lambda net, inner: DiLoCo(net, inner, 2), f"DiLoCo {FRAGMENT}", 4),
    "int8": (lambda net, inner: DiLoCo(net, inner, 2, wire="int8"), f"DiLoCo {FRAGMENT}", 4),
}
SLOW_METHODS = [pytest.param(method, marks=pytest.mark.slow) for method in ("diloco", "int8")]


@pytest.mark.rest_is_thorough("periodic", "int8")
@pytest.mark.parametrize("method", ["periodic", "overlapped", *SLOW_METHODS])
def test_a_rank_that_takes_fewer_steps(method):
    """The others' wait ends after the process group's timeout, with an error that says what they waited for."""
    make, words, step = METHODS[method]

    def work(rank):
        net = make_net()
        optimizer = make(net, sgd(net.parameters()))  # keep it: freeing it would disconnect the rank
        train(net, optimizer, rank, range(3 if rank == 1 else 6))
        if rank == 1:
            signal.pause()  # it stays connected until the other has raised, and is killed then

    outcomes = run_outcomes(work, 2, group_timeout_s=8.0, needed_ranks={0})
    error = outcomes[0].error or ""
    pattern = rf"torchddp.*TransportError: rank 0: {words} \('embed.weight', .* at step {step}"
    assert re.search(pattern, error), error
    assert "takes a different number of steps" in error
