"""Periodic and hierarchical averages, post-local SGD, compared with torch's and with the papers; errors."""

import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import torchddp
from tests.averaging import EXACT, ROUNDING, assert_close, assert_same_on_all_ranks, batch_of, make_net, sgd, train
from tests.harness import assert_each_raises, each, on_ranks, run_outcomes, through_a_file
from tests.oss import weights
from torchddp.averaging import DiLoCo, HierarchicalAverager, PeriodicAverager, PostLocalSGD
from torchddp.optim import OSS


def trained_as_by(reference, make, rank, averages_at):
    """Train nine steps with an averager and, on another model, with torch's; (our model, our averager)."""
    mine, theirs = make_net(rank, torch.float64), make_net(rank, torch.float64)
    averager = make(mine)
    optimizers = sgd(mine.parameters()), sgd(theirs.parameters())
    for step in range(9):
        for model, optimizer in zip((mine, theirs), optimizers, strict=True):
            train(model, optimizer, rank, range(step, step + 1))
        averager.average_parameters()
        reference.average_parameters(theirs.parameters())
        # torch's moves weights in memory, where products may round differently.
        assert_close(mine, theirs, **ROUNDING)
        if step in averages_at:
            assert_same_on_all_ranks(mine)
    assert averager.step == reference.step == 9
    return mine, averager


@on_ranks(1, 2, 3)
def test_periodic_average_is_torchs(rank, world_size):
    mine, theirs = make_net(rank), make_net(rank)
    PeriodicAverager(mine, 1).average_now()
    for param in theirs.parameters():
        param.grad = torch.zeros_like(param)
    PeriodicModelAverager(2).average_parameters(theirs.parameters())
    # Sums of two ranks have only one order; gloo's order for more ranks varies.
    assert_close(mine, theirs, **(EXACT if world_size <= 2 else {"rtol": 1e-6, "atol": 1e-7}))

    torchs = PeriodicModelAverager(period=3, warmup_steps=2)
    mine, averager = trained_as_by(
        torchs, lambda net: PeriodicAverager(net, period=3, warmup_steps=2, bucket_cap_mb=0.001), rank, [2, 5, 8]
    )
    payload = sum(p.nbytes for p in mine.parameters() if p.requires_grad)
    assert averager.traffic.payload_bytes == payload
    assert averager.traffic.wire_bytes == 2 * (world_size - 1) * payload // world_size


@on_ranks(2, 3)
def test_narrow_and_complex_parameters_and_buffers(rank):
    module = torch.nn.Module()
    size = dist.get_world_size()
    module.low = torch.nn.Parameter(torch.full((700,), 1.0 + rank, dtype=torch.bfloat16))
    module.narrow = torch.nn.Parameter(torch.full((9,), 40000.0, dtype=torch.float16))  # its sum overflows
    module.wide = torch.nn.Parameter(torch.full((2, 3), rank / 3, dtype=torch.float64))
    module.spin = torch.nn.Parameter(torch.full((4,), complex(rank, 1), dtype=torch.complex64))
    module.register_buffer("seen", torch.tensor(float(rank)))
    module.register_buffer("count", torch.tensor(rank))
    module.register_buffer("tiny", torch.tensor([4.0 * (rank + 1)]).to(torch.float8_e4m3fn))
    PeriodicAverager(module, 1, buffers=True).average_parameters()
    mean = (size - 1) / 2
    assert torch.equal(module.low, torch.full_like(module.low, 1 + mean))
    assert torch.equal(module.narrow, torch.full_like(module.narrow, 40000.0))
    torch.testing.assert_close(module.wide, torch.full_like(module.wide, mean / 3))
    torch.testing.assert_close(module.spin, torch.full_like(module.spin, complex(mean, 1)))
    assert module.seen == mean and module.count == rank and module.tiny.float() == 4 * (mean + 1)
    assert_same_on_all_ranks(module)


@on_ranks(4)
def test_hierarchical_average_is_torchs(rank):
    levels = {2: 2, 4: 4}
    torchs = HierarchicalModelAverager(levels, warmup_steps=1)
    # Step 8 averages over all ranks.
    mine, averager = trained_as_by(torchs, lambda net: HierarchicalAverager(net, levels, warmup_steps=1), rank, [8])
    pairs = HierarchicalAverager(mine, list(averager.period_process_group_dict.items()))
    pairs.step = 2
    with torch.no_grad():
        mine.embed.bias.fill_(rank)
    pairs.average_parameters()
    assert torch.equal(mine.embed.bias, torch.full_like(mine.embed.bias, rank // 2 * 2 + 0.5))


@on_ranks(2)
def test_parameters_thawed_replaced_and_frozen_later(rank):
    model = make_net(rank)
    model.embed.requires_grad_(False)
    averager = PeriodicAverager(model, 1)
    averager.average_parameters()
    model.requires_grad_(True)
    model.blocks[0].weight = torch.nn.Parameter(torch.full((20, 20), float(rank)))
    with torch.no_grad():
        model.blocks[1].weight.fill_(rank)
    model.blocks[1].requires_grad_(False)  # before its average
    averager.average_parameters()
    assert_same_on_all_ranks(model)
    assert torch.equal(model.blocks[0].weight, torch.full((20, 20), 0.5))
    assert averager.traffic.payload_bytes == sum(p.nbytes for p in model.parameters())
    if rank == 1:
        model.extra = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="On rank 1 it is 'extra' .*, new"):
        averager.average_parameters()
    if rank == 1:
        del model.extra
        model.conv.bias = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"On rank 1 it is 'conv.bias' .*, new, on rank 0 'conv.bias'"):
        averager.average_parameters()


@on_ranks(2)
def test_a_module_converted_later(rank):
    for as_module in (True, False):
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        averager = PeriodicAverager(model if as_module else list(model.parameters()), 1)
        averager.average_parameters()
        for param in model.double().parameters():
            param.data = torch.full((3, *param.shape), 1.0 + rank * 2**-40, dtype=torch.float64)
        averager.average_parameters()
        for param in model.parameters():
            assert torch.equal(param, torch.full_like(param, 1.0 + 2**-41))


@on_ranks(2)
def test_buffers_that_the_module_replaces(rank):
    def replace(model, shape=(20,)):
        model.norm.running_var = torch.full(shape, 1.0 + rank)

    for make in each(["PeriodicAverager", "DiLoCo", "DiLoCo in fragments"]):
        model = make_net()
        if make == "PeriodicAverager":
            average = PeriodicAverager(model, 1, buffers=True).average_now
        else:
            fragments = 1 if make == "DiLoCo" else 2
            average = DiLoCo(model, sgd(model.parameters()), 4, buffers=True, fragments=fragments).synchronize
        for _ in range(2):
            replace(model)
            average()
            assert torch.equal(model.norm.running_var, torch.full((20,), 1.5))
        replace(model, (5, 4))
        became = r"buffer 'norm.running_var' became torch.float32\[5, 4\] .* averaged as torch.float32\[20\]"
        with pytest.raises(ValueError, match=became):
            average()


@on_ranks(2)
def test_post_local_sgd_is_interchangeable_with_torchs(rank):
    models = [make_net(rank, torch.float64) for _ in range(4)]
    # A wrapper that averages no gradients is equivalent to the bare module.
    models[0] = torchddp.DistributedDataParallel(models[0], init_sync=False)
    optimizers = [
        PostLocalSGD(sgd(models[0].parameters()), PeriodicAverager(models[0], 4)),
        PostLocalSGDOptimizer(sgd(models[1].parameters()), PeriodicAverager(models[1], 4)),
        PostLocalSGD(sgd(models[2].parameters()), PeriodicModelAverager(4)),
        PostLocalSGDOptimizer(sgd(models[3].parameters()), PeriodicModelAverager(4)),
    ]
    with models[0].no_sync():
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, rank, range(6))
    for model in models[1:]:
        assert_close(models[0], model, **ROUNDING)
    # Each resumes from the other's checkpoint.
    optimizers[0].load_state_dict(through_a_file(optimizers[3].state_dict()))
    optimizers[3].load_state_dict(through_a_file(optimizers[0].state_dict()))
    assert optimizers[0].averager.step == optimizers[3].averager.step == 6
    with models[0].no_sync():
        for model, optimizer in zip(models[::3], optimizers[::3], strict=True):
            train(model, optimizer, rank, range(6, 10))
    assert_close(models[0], models[3], **ROUNDING)
    with pytest.warns(UserWarning, match="no 'step'"):
        optimizers[0].load_state_dict(sgd(models[0].parameters()).state_dict())
    assert optimizers[0].averager.step == 0


@on_ranks(2)
def test_a_loss_scaler_that_skips_a_step_on_one_rank(rank):
    model = make_net(0)
    optimizer = PostLocalSGD(sgd(model.parameters()), PeriodicAverager(model, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.embed.weight.detach().clone()
    for step in range(3):
        model.zero_grad()
        scaler.scale(model(batch_of(rank, step)).square().mean()).backward()
        if step == 0 and rank == 1:
            model.embed.bias.grad[0] = float("inf")
        scaler.step(optimizer.optim)
        assert step > 0 or torch.equal(before, model.embed.weight) == (rank == 1)
        optimizer.after_step()
        scaler.update()
    assert_same_on_all_ranks(model)


@on_ranks(2)
def test_schedulers_closures_and_hooks_work_on_the_wrapper(rank):
    model = make_net(0)
    inner = sgd(model.parameters())
    optimizer = PostLocalSGD(inner, PeriodicAverager(model, 2))
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(inner.param_groups[0]["lr"]))

    def closure():
        model(batch_of(rank, 0)).square().mean().backward()
        return 7

    for _ in range(4):
        assert optimizer.step(closure) == 7
        scheduler.step()
    assert seen == [0.05, 0.05, 0.025, 0.025]
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2, 3)
def test_nan_reaches_all_ranks(rank):
    for wire in each(["no DiLoCo", None, "int8"]):
        model = make_net(0)
        periodic = PeriodicAverager(model, 1).average_parameters
        average = periodic if wire == "no DiLoCo" else DiLoCo(model, sgd(model.parameters()), 1, wire=wire).after_step
        if rank == 1:
            with torch.no_grad():
                model.blocks[1].bias[3] = float("nan")
        average()
        assert model.blocks[1].bias[3].isnan()
        # int8 codes share a scale per block, so a NaN also spoils its neighbors.
        assert 1 <= sum(int(p.isnan().sum()) for p in model.parameters()) <= (512 if wire == "int8" else 1)


def test_without_a_process_group():
    for make in (OSS, lambda params: PeriodicAverager(params, 1)):
        assert_each_raises((lambda make=make: make(weights(2)), RuntimeError, "init_process_group first"))


@on_ranks(2)
def test_arguments_of_averagers(rank):
    net = make_net()
    gaps = torch.nn.Parameter(torch.ones(4, 6)[:, :3])

    def periodic(params=net, period=1, **options):
        return lambda: PeriodicAverager(params, period, **options)

    def hierarchical(periods):
        return lambda: HierarchicalAverager(net, periods)

    assert_each_raises(
        (periodic(period="2"), TypeError, "period must be an integer, at least 1 step, got '2'"),
        (periodic(process_group="gloo"), TypeError, "process_group must be a process group or None, got str"),
        (periodic(period=0), ValueError, "period must be at least 1 step, got 0"),
        (periodic(warmup_steps=-1), ValueError, "warmup_steps must be at least 0, got -1"),
        (periodic(bucket_cap_mb=0), ValueError, "bucket_cap_mb must be above 0, got 0"),
        (periodic([]), ValueError, "there is no parameter to average"),
        (periodic([("gaps", gaps)]), ValueError, "parameter 'gaps' (shape [4, 3], strides [6, 1]) leaves gaps"),
        (periodic(["weight"]), TypeError, "params[0] must be a parameter, got str"),
        (periodic(net.embed.weight), TypeError, "got a tensor"),
        (periodic(None), TypeError, "or an iterable of parameters, named parameters or groups, got NoneType"),
        (periodic(list(net.parameters()), buffers=True), TypeError, "buffers=True needs a module as params, got list"),
        (hierarchical({}), ValueError, "periods must not be empty"),
        (hierarchical({0: 2}), ValueError, "periods must be at least 1 step, got 0"),
        (hierarchical({4: 1, 2: 2}), ValueError, "periods must ascend, got {4: 1, 2: 2}"),
        (hierarchical({2: 2, 4: 2}), ValueError, "group sizes must grow with their periods, got {2: 2, 4: 2}"),
        (hierarchical({2: 1}), ValueError, "the last group must be all 2 ranks"),
        (lambda: PostLocalSGD(sgd(net.parameters()), 4), TypeError, "averager must be one of this package's"),
        (lambda: PostLocalSGD(net, periodic()()), TypeError, "PostLocalSGD needs a torch.optim.Optimizer, got Net"),
    )


@on_ranks(2)
def test_arguments_of_diloco(rank):
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

    only = "wire='int8' can't carry parameter 'wide' in torch.float64"
    assert_each_raises(
        (diloco(optimizer=oss), ValueError, "DiLoCo can't wrap OSS, whose steps are collective"),
        (diloco(every=0), ValueError, "sync_every must be at least 1 step, got 0"),
        (diloco(fragments=0), ValueError, "fragments must be at least 1, got 0"),
        (diloco(outer_lr=None), TypeError, "outer_lr must be a number above 0, got None"),
        (diloco(outer_lr=0.0), ValueError, "outer_lr must be above 0, got 0.0"),
        (diloco(outer_momentum=1.0), ValueError, "outer_momentum must be at least 0 and below 1, got 1.0"),
        (diloco(outer_optimizer=inner), TypeError, "outer_optimizer must be a function: lambda"),
        (diloco(outer_optimizer=lambda p: p), TypeError, "outer_optimizer must return an optimizer, got list"),
        (diloco(wire="int2"), ValueError, "one of 'fp32', 'bf16', 'fp16', 'int8', 'int4', got 'int2'"),
        (diloco(net.blocks), ValueError, "the optimizer steps params[1] (shape [20, 12]), which is not averaged"),
        (lambda: done.add_param_group({"params": few}), RuntimeError, "DiLoCo can't add parameters"),
        (lambda: done.load_state_dict(inner.state_dict()), ValueError, "the state dict has no 'diloco'"),
        (lambda: done.__getstate__(), TypeError, "DiLoCo can't be copied or pickled"),
        (diloco(wide, sgd([p for _, p in wide]), wire="int8"), TypeError, only),
        (diloco(spin, sgd([p for _, p in spin])), TypeError, "parameter 'spin' is torch.complex64"),
        (in_fragments(fragments=3), ValueError, "at most 2, the number of parameters, got 3"),
        (in_fragments(1), ValueError, "fragments must be at most sync_every=1"),
        (in_fragments(overlap_steps=4), ValueError, "below sync_every // fragments = 4, got 4"),
        (in_fragments(overlap_steps=-1), ValueError, "got -1"),
        (in_fragments(alpha=1.0), ValueError, "alpha must be at least 0 and below 1"),
    )


WEIGHTS, FRAGMENT = "could not average weights", "could not average fragment 0 of 1"
METHODS = {
    "periodic": (lambda net, inner: PostLocalSGD(inner, PeriodicAverager(net, 2)), f"PeriodicAverager {WEIGHTS}", 4),
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

    error = run_outcomes(work, 2, group_timeout_s=8.0, needed_ranks={0})[0].error or ""
    cause = r"torchddp\S*TransportError: (timed out|rank 0: comparing the ranks failed:) .*?"
    pattern = rf"{cause}\n *rank 0: {words} \('embed.weight', .* at step {step}. All ranks must"
    assert re.search(pattern, error, re.DOTALL), error


def test_a_rank_that_dies():
    """The error begins with that, and does not blame the number of steps."""

    def work(rank):
        net = make_net()
        optimizer = DiLoCo(net, sgd(net.parameters()), 2)
        train(net, optimizer, rank, range(3))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(torchddp.TransportError) as raised:
            train(net, optimizer, rank, range(3, 6))
        return str(raised.value)

    error = run_outcomes(work, 2, needed_ranks={0})[0].value or ""
    assert re.match(r"rank 1 died: [^\n]*\nrank 0: DiLoCo could not average fragment 0 of 1 ", error), error
    assert "same number of steps" not in error and "go back to a checkpoint" in error
