"""What torchddp.averaging refuses, in words that name parameter and rank; and ranks that take fewer steps."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.averaging import make_net, train
from tests.harness import run_outcomes, run_ranks
from torchddp.averaging import DiLoCo, HierarchicalAverager, PeriodicAverager, PostLocalSGD, SlowMo, StreamingDiLoCo
from torchddp.optim import OSS


def sgd(params):
    return torch.optim.SGD(params, lr=0.05)


def error_of(make):
    with pytest.raises(Exception) as caught:
        make()
    return type(caught.value).__name__, str(caught.value)


def check(found, expected):
    for (kind, text), (wanted_kind, words) in zip(found, expected, strict=True):
        assert kind == wanted_kind and words in text, text


def weights(*shapes, dtype=torch.float32):
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def test_averagers():
    def work(rank):
        net = make_net()
        gaps = torch.nn.Parameter(torch.ones(4, 6)[:, :3])
        return [
            error_of(lambda: PeriodicAverager(net, 0)),
            error_of(lambda: PeriodicAverager(net, 1, warmup_steps=-1)),
            error_of(lambda: PeriodicAverager(net, 1, bucket_cap_mb=0)),
            error_of(lambda: PeriodicAverager([], 1)),
            error_of(lambda: PeriodicAverager([("gaps", gaps)], 1)),
            error_of(lambda: PeriodicAverager(["weight"], 1)),
            error_of(lambda: PeriodicAverager(net.embed.weight, 1)),
            error_of(lambda: PeriodicAverager(list(net.parameters()), 1, buffers=True)),
            error_of(lambda: HierarchicalAverager(net, {})),
            error_of(lambda: HierarchicalAverager(net, {0: 2})),
            error_of(lambda: HierarchicalAverager(net, {4: 1, 2: 2})),
            error_of(lambda: HierarchicalAverager(net, {2: 2, 4: 2})),
            error_of(lambda: HierarchicalAverager(net, {2: 1})),
            error_of(lambda: PostLocalSGD(sgd(net.parameters()), 4)),
            error_of(lambda: PostLocalSGD(net, PeriodicAverager(net, 1))),
        ]

    expected = [
        ("ValueError", "period must be at least 1 step, got 0"),
        ("ValueError", "warmup_steps must be at least 0, got -1"),
        ("ValueError", "bucket_cap_mb must be above 0, got 0"),
        ("ValueError", "there is no parameter to average"),
        ("ValueError", "parameter 'gaps' (shape [4, 3], strides [6, 1]) leaves gaps"),
        ("TypeError", "params[0] must be a parameter, got str"),
        ("TypeError", "got a tensor"),
        ("TypeError", "buffers=True needs a module as params, got list"),
        ("ValueError", "periods must not be empty"),
        ("ValueError", "periods must be at least 1 step, got 0"),
        ("ValueError", "periods must ascend, got {4: 1, 2: 2}"),
        ("ValueError", "group sizes must grow with their periods, got {2: 2, 4: 2}"),
        ("ValueError", "the last group must be all 2 ranks"),
        ("TypeError", "averager must be a PeriodicAverager"),
        ("TypeError", "PostLocalSGD needs a torch.optim.Optimizer, got Net"),
    ]
    for found in run_ranks(work, 2):
        check(found, expected)
    assert "init_process_group first" in error_of(lambda: PeriodicAverager(weights(2), 1))[1]


def test_optimizers():
    def work(rank):
        net = make_net()
        inner = sgd(net.parameters())
        oss = OSS(weights(2, 3), torch.optim.SGD, lr=0.1)
        no_lr = sgd(net.parameters())
        del no_lr.param_groups[0]["lr"]
        done = DiLoCo(net, inner, 2)
        return [
            error_of(lambda: SlowMo(inner, 0)),
            error_of(lambda: SlowMo(inner, 2, slow_momentum=1.0)),
            error_of(lambda: SlowMo(inner, 2, slow_lr=0.0)),
            error_of(lambda: SlowMo(inner, PeriodicAverager(net, 2), process_group=dist.group.WORLD)),
            error_of(lambda: SlowMo(oss, 2)),
            error_of(lambda: SlowMo(no_lr, 2)),
            error_of(lambda: DiLoCo(net, inner, 0)),
            error_of(lambda: DiLoCo(net, inner, 2, outer_lr=0.0)),
            error_of(lambda: DiLoCo(net, inner, 2, outer_momentum=1.0)),
            error_of(lambda: DiLoCo(net, inner, 2, outer_optimizer=inner)),
            error_of(lambda: DiLoCo(net, inner, 2, outer_optimizer=lambda params: params)),
            error_of(lambda: DiLoCo(net, inner, 2, wire="int2")),
            error_of(lambda: DiLoCo(net.blocks, inner, 2)),
            error_of(lambda: done.add_param_group({"params": weights(2)})),
            error_of(lambda: done.load_state_dict(inner.state_dict())),
            error_of(lambda: done.__getstate__()),
        ]

    expected = [
        ("ValueError", "period must be at least 1 step, got 0"),
        ("ValueError", "slow_momentum must be at least 0 and below 1, got 1.0"),
        ("ValueError", "slow_lr must be above 0, got 0.0"),
        ("ValueError", "leave out process_group"),
        ("ValueError", "SlowMo can't wrap OSS, whose steps are collective"),
        ("ValueError", "SGD has a group without 'lr'"),
        ("ValueError", "sync_every must be at least 1 step, got 0"),
        ("ValueError", "outer_lr must be above 0, got 0.0"),
        ("ValueError", "outer_momentum must be at least 0 and below 1, got 1.0"),
        ("TypeError", "outer_optimizer must be a function from parameters to an optimizer"),
        ("TypeError", "outer_optimizer must return an optimizer, got list"),
        ("ValueError", "wire must be None or one of 'fp32', 'bf16', 'fp16', 'int8', 'int4', got 'int2'"),
        ("ValueError", "the optimizer steps params[1] (shape [20, 12]), which is not among"),
        ("RuntimeError", "DiLoCo takes no parameters later"),
        ("ValueError", "the state dict has no 'diloco'"),
        ("TypeError", "DiLoCo can't be copied or pickled"),
    ]
    for found in run_ranks(work, 2):
        check(found, expected)


def test_dtypes_and_fragments():
    def work(rank):
        wide = [("wide", *weights(3, dtype=torch.float64))]
        spin = [("spin", *weights(3, dtype=torch.complex64))]
        few = weights(2, 3)

        def streaming(every, **options):
            return StreamingDiLoCo(few, sgd(few), every, **options)

        return [
            error_of(lambda: DiLoCo(wide, sgd([p for _, p in wide]), 2, wire="int8")),
            error_of(lambda: DiLoCo(spin, sgd([p for _, p in spin]), 2)),
            error_of(lambda: streaming(8, fragments=3)),
            error_of(lambda: streaming(8, fragments=0)),
            error_of(lambda: streaming(1, fragments=2)),
            error_of(lambda: streaming(8, fragments=2, overlap_steps=4)),
            error_of(lambda: streaming(8, fragments=2, overlap_steps=-1)),
            error_of(lambda: streaming(8, fragments=2, alpha=1.0)),
        ]

    expected = [
        ("TypeError", "wire='int8' carries float32, bfloat16 and float16, but parameter 'wide' is torch.float64"),
        ("TypeError", "parameter 'spin' is torch.complex64"),
        ("ValueError", "fragments must be at least 1 and at most 2, the number of parameters, got 3"),
        ("ValueError", "fragments must be at least 1 and at most 2, the number of parameters, got 0"),
        ("ValueError", "fragments must be at most sync_every=1"),
        ("ValueError", "below sync_every // fragments = 4, so that one fragment is on the way at a time, got 4"),
        ("ValueError", "got -1"),
        ("ValueError", "alpha must be at least 0 and below 1"),
    ]
    for found in run_ranks(work, 2):
        check(found, expected)


def test_models_and_options_that_differ_between_ranks():
    def work(rank):
        shapes = weights(4, 3 + rank // 2)
        net = make_net()
        return [
            error_of(lambda: PeriodicAverager([("a", shapes[0]), ("b", shapes[1])], 1)),
            error_of(lambda: DiLoCo(net, sgd(net.parameters()), 4 + rank // 2)),
            error_of(lambda: DiLoCo(net, sgd(net.parameters()), 4, outer_lr=0.5 if rank == 1 else 0.7)),
            error_of(lambda: SlowMo(sgd(net.parameters()), 4, slow_momentum=0.5 if rank == 1 else 0.7)),
        ]

    expected = [
        ("RuntimeError", "PeriodicAverager needs the same parameters on all ranks. On rank 2 it is 'b'"),
        ("RuntimeError", "On rank 2 it is sync_every=5"),
        ("RuntimeError", "On rank 1 it is sync_every=4, outer_lr=0.5"),
        ("RuntimeError", "On rank 1 it is slow_momentum=0.5"),
    ]
    for found in run_ranks(work, 3):
        check(found, expected)


SLOW_METHODS = [pytest.param(method, marks=pytest.mark.slow) for method in ("diloco", "int8")]


@pytest.mark.rest_is_thorough("periodic", "int8")
@pytest.mark.parametrize("method", ["periodic", "streaming", *SLOW_METHODS])
def test_a_rank_that_takes_fewer_steps(method):
    """The others' wait ends with the process group's time limit, in an error that says what was waited for."""

    def work(rank):
        net = make_net()
        inner = sgd(net.parameters())
        if method == "periodic":
            optimizer = PostLocalSGD(inner, PeriodicAverager(net, 2))
        elif method == "streaming":
            optimizer = StreamingDiLoCo(net, inner, 2, fragments=1, overlap_steps=1)
        else:
            optimizer = DiLoCo(net, inner, 2, wire=None if method == "diloco" else method)
        train(net, optimizer, rank, range(3 if rank == 1 else 6))
        if rank == 1:
            time.sleep(6)

    outcomes = run_outcomes(work, 2, group_timeout_s=2.0, straggler_s=20.0, needed_ranks={0})
    error = outcomes[0].error or ""
    who = {"periodic": "PeriodicAverager", "streaming": "StreamingDiLoCo"}.get(method, "DiLoCo")
    what = "fragment 0" if method == "streaming" else "bucket 0 of 1"
    step = {"periodic": 4, "streaming": 5}.get(method, 4)
    pattern = rf"torchddp.*TransportError: rank 0: {who} could not average {what} \('embed.weight', .* at step {step}"
    assert re.search(pattern, error), error
    assert "takes another number of steps" in error
