"""torch's ways to write models and steps, including mixed precision: bitwise equal to torch's class."""

import json
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import torchddp
from tests.harness import each, is_own_class, on_ranks
from tests.models import (
    Mlp,
    WithGradientIf,
    assert_grads,
    batch,
    grads_of,
    loss_of,
    same_on_all_ranks,
    seeded,
    step_on,
)
from tests.parity.compare import TorchDDP
from tests.torch_features import assert_same_program

STEPS = 4
SMALL = {"bucket_cap_mb": 0.001}
linear = partial(nn.Linear, dtype=torch.float64)


def steps_program(make, optimizer=None, forward=None, averages=False, **options):
    """Train what `make` builds; return gradients and parameters after each step."""

    def program(cls):
        ddp = cls(seeded(make), **options)
        stepper = None if optimizer is None else optimizer(ddp.parameters())
        average, seen = AveragedModel(ddp) if averages else None, []
        for step in range(STEPS):
            ddp.zero_grad()
            inputs = batch(dist.get_rank(), step)
            loss_of(forward(ddp, inputs) if forward is not None else ddp(inputs)).backward()
            seen.append(grads_of(ddp))
            if stepper is not None:
                stepper.step()
                seen[-1] |= {f"{name} itself": p.detach().clone() for name, p in ddp.named_parameters()}
            if average is not None:
                average.update_parameters(ddp)
                seen[-1] |= {f"{name} averaged": p.detach().clone() for name, p in average.named_parameters()}
        return seen

    return program


class Symmetric(nn.Module):
    """A parametrization: a symmetric weight from a learned one."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def having(*changes):
    """Return a function that builds a small model with these changes."""

    def make():
        model = nn.Sequential(linear(8, 8), nn.Tanh(), linear(8, 8))
        for change in changes:
            change(model)
        return model

    return make


def lazy_but_initialized():
    """tests/fault/test_bad_input.py tests uninitialized ones."""
    model = nn.Sequential(nn.LazyLinear(6, dtype=torch.float64), nn.Tanh(), nn.LazyLinear(2, dtype=torch.float64))
    model(torch.zeros(1, 8, dtype=torch.float64))
    return model


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class LacksGradients(Mlp):
    """One parameter has no gradient in each rank's first steps."""

    def __init__(self):
        super().__init__()
        self.gain, self.steps = nn.Parameter(torch.ones(1, dtype=torch.float64)), 0

    def forward(self, x):
        self.steps += 1
        return super().forward(x) * WithGradientIf.apply(self.gain, self.steps > 1 + dist.get_rank())


def functional_call(ddp, x, **replaced):
    """A replaced parameter gets no gradient; find_unused_parameters handles it."""
    values = dict(ddp.named_parameters())
    values |= {name: torch.full_like(values[name], value) for name, value in replaced.items()}
    return torch.func.functional_call(ddp, values, (x,))


def checkpoint_around(ddp, x, reentrant):
    """The wrapper's forward runs twice per step."""
    return checkpoint(ddp, x.requires_grad_(), use_reentrant=reentrant)


class Autocast(Mlp):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


float_mlp = partial(Mlp, dtype=torch.float32)
SGD = partial(torch.optim.SGD, lr=0.01)


def traced_first(ddp, inputs):
    if ddp.training:
        torch.jit.trace(ddp.eval(), inputs)  # twice, and compares
    return ddp(inputs)


PROGRAMS = {
    "weight norm": steps_program(
        having(lambda m: parametrizations.weight_norm(m[0]), lambda m: parametrizations.orthogonal(m[2])), SGD, **SMALL
    ),
    "symmetric": steps_program(
        having(lambda m: parametrize.register_parametrization(m[0], "weight", Symmetric())), SGD, **SMALL
    ),
    # It has buffers that forward changes.
    "spectral norm": steps_program(having(lambda m: parametrizations.spectral_norm(m[0])), SGD, **SMALL),
    "scripted": steps_program(having(lambda m: setattr(m, "0", torch.jit.script(m[0]))), **SMALL),
    "traced": steps_program(having(), forward=traced_first),
    "lazy": steps_program(lazy_but_initialized),
    "autograd function around": steps_program(Mlp, forward=lambda ddp, x: Doubled.apply(ddp(x))),
    "averaged": steps_program(Mlp, SGD, averages=True),
    "autocast inside": steps_program(partial(Autocast, dtype=torch.float32), forward=lambda ddp, x: ddp(x.float())),
    "functional call": steps_program(Mlp, forward=functional_call),
    "functional call, one replaced": steps_program(
        Mlp, forward=partial(functional_call, **{"module.last.weight": 0.5}), find_unused_parameters=True
    ),
}
for reentrant, static in ((False, False), (False, True), (True, True)):  # torch refuses the other combination
    checkpointed = partial(checkpoint_around, reentrant=reentrant)
    PROGRAMS[f"checkpoint, {reentrant=}, {static=}"] = steps_program(Mlp, forward=checkpointed, static_graph=static)
for option in ("find_unused_parameters", "static_graph"):
    PROGRAMS[f"gradients are lacking, {option}"] = steps_program(LacksGradients, **{option: True})
for optim in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
    PROGRAMS[f"fused {optim.__name__}"] = steps_program(Mlp, partial(optim, lr=0.01, fused=True))


@on_ranks(2)
def test_programs(ddp_class):
    for _, program in each(PROGRAMS.items()):
        assert_same_program(ddp_class, program, reductions=STEPS)


def ranges(cls, path):
    """The names in the trace of two steps."""
    ddp = cls(seeded(Mlp), bucket_cap_mb=0.001)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for step in range(2):
            with torch.profiler.record_function("my step"):
                step_on(ddp, dist.get_rank(), step)
    profiler.export_chrome_trace(str(path))
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


@on_ranks(2)
def test_traces_of_torchs_profiler(rank, tmp_path):
    """A trace has the names that scripts search for in torch's. test_profiler.py tests names of buckets."""
    ours, theirs = (ranges(cls, tmp_path / f"{rank}.json") for cls in (torchddp.DDP, TorchDDP))
    wanted = {name for name in theirs if name.startswith(("DistributedDataParallel", "gloo:", "my step"))}
    assert len(wanted) > 2 and wanted <= set(ours), wanted - set(ours)
    assert ours.count("DistributedDataParallel.forward") == 2


class KeepsOneToItself(nn.BatchNorm1d):
    """A buffer that it doesn't list, which each rank therefore keeps."""

    def __init__(self):
        super().__init__(4)
        self.register_buffer("own", torch.full((3,), float(dist.get_rank())))

    def named_buffers(self, *args, **options):
        return ((name, buffer) for name, buffer in super().named_buffers(*args, **options) if name != "own")


@on_ranks(2)
def test_buffers_that_a_module_does_not_list(ddp_class, rank):
    def train(cls):
        module = KeepsOneToItself()
        ddp = cls(module)
        for step in range(3):
            loss_of(ddp(batch(rank, step, 6, 4, dtype=torch.float32))).backward()
        return {"own": module.own, "mean": module.running_mean, "bias": module.bias.grad}

    ours, theirs = train(ddp_class), train(TorchDDP)
    assert_grads(ours, theirs, 0.0)
    assert torch.equal(ours["own"], torch.full((3,), float(rank)))


@on_ranks(2)
def test_torch_func_grad(ddp_class, rank):
    """Before each step, also those in which buckets are rebuilt, where torch's class raises."""
    checked = {"checks": torchddp.Checks(parameters_every=1)} if is_own_class() else {}
    ours, theirs = ddp_class(seeded(Mlp), **SMALL, **checked), TorchDDP(seeded(Mlp))
    for step in range(4):
        x = batch(rank, step)
        found = [torch.func.grad(lambda x, m=m: m(x).square().sum())(x) for m in (ours, theirs.module)]
        assert torch.equal(*found)
        for model in (ours, theirs):
            model.zero_grad()
            step_on(model, rank, step)
        assert_grads(grads_of(ours), grads_of(theirs), 0.0)


SCALED_STEPS, OVERFLOWS = 6, (1, 4)


def scaled_program(rank, clip=None, accumulate=1, autocasts=False, **options):
    """Gradients and the scale after each step; in the steps of OVERFLOWS rank 1's loss overflows."""

    def program(cls):
        ddp = cls(seeded(float_mlp), **options)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        seen = []
        for step in range(SCALED_STEPS):
            optimizer.zero_grad()
            for part in range(accumulate):
                ddp.require_backward_grad_sync = part == accumulate - 1
                with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                    loss = loss_of(ddp(batch(rank, 10 * step + part, dtype=torch.float32)).float())
                scaler.scale(loss * math.inf if rank == 1 and step in OVERFLOWS else loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), clip, foreach=True)
            before = nn.utils.parameters_to_vector(ddp.parameters()).detach().clone()
            scaler.step(optimizer)
            scaler.update()
            after = nn.utils.parameters_to_vector(ddp.parameters()).detach()
            assert torch.equal(before, after) == (step in OVERFLOWS), f"rank {rank}, step {step}"
            assert same_on_all_ranks([after, torch.tensor(scaler.get_scale())])
            seen.append({"parameters": after.clone(), "scale": torch.tensor(scaler.get_scale())})
            if step not in OVERFLOWS:  # NaN is not equal to itself
                seen[-1] |= grads_of(ddp)
        return seen

    return program


@on_ranks(2)
def test_an_overflow_on_one_rank_is_skipped_on_all(rank, ddp_class):
    """If a gradient is infinite on one rank, its average is on all, so all scalers decide alike."""
    options = [{"static_graph": True}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}]
    together = {"clip": 1.0, "accumulate": 3, "autocasts": True}
    for case in each([{}, *options, {"clip": 0.5}, {"clip": 1e6}, together]):
        assert_same_program(ddp_class, scaled_program(rank, **case), reductions=SCALED_STEPS)
