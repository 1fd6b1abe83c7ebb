"""Ways of writing models and steps that torch offers, over our class and over torch's: the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.harness import on_ranks, run_ranks
from tests.models import Mlp, batch, grads_of, loss_of, seeded
from tests.torch_features import assert_same_program

STEPS = 4


def steps_program(make, optimizer=None, forward=None, after_backward=None, shape=(5, 8), **options):
    """Trains what `make` builds; gradients and parameters after each step."""

    def program(cls):
        ddp = cls(seeded(make), **options)
        stepper = None if optimizer is None else optimizer(ddp)
        seen = []
        for step in range(STEPS):
            ddp.zero_grad()
            inputs = batch(dist.get_rank(), step, *shape)
            loss_of(forward(ddp, inputs) if forward is not None else ddp(inputs)).backward()
            if after_backward is not None:
                after_backward(ddp)
            seen.append(grads_of(ddp))
            if stepper is not None:
                stepper.step()
                seen[-1] |= {f"{name} itself": p.detach().clone() for name, p in ddp.named_parameters()}
        return seen

    return program


def assert_same(ddp_class, program, reductions=STEPS):
    run_ranks(lambda rank: assert_same_program(ddp_class, program, reductions=reductions), 2)


# --- parametrised weights ---


class Symmetric(nn.Module):
    """A weight that is half of what is learned."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def with_weight_norm():
    model = Mlp()
    parametrizations.weight_norm(model.middle)
    parametrizations.orthogonal(model.last)
    return model


def with_symmetric():
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 8, dtype=torch.float64))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return model


def with_spectral_norm():
    model = Mlp()
    parametrizations.spectral_norm(model.first)  # has buffers of its own, which forward changes
    return model


def with_tied_weights():
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 8, dtype=torch.float64))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("make", [with_weight_norm, with_symmetric, with_spectral_norm, with_tied_weights])
def test_parametrised_weights(ddp_class, make):
    sgd = lambda ddp: torch.optim.SGD(ddp.parameters(), lr=0.01)  # noqa: E731
    assert_same(ddp_class, steps_program(make, sgd, bucket_cap_mb=0.001))


# --- recomputed activations ---


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(2)
def test_checkpoint_of_the_whole_wrapper(ddp_class, use_reentrant, static_graph):
    """Around the wrapper: its forward runs twice a step. torch refuses the reentrant form without static_graph."""

    def run(ddp, x):
        return checkpoint(ddp, x.requires_grad_(), use_reentrant=use_reentrant)

    def attempt(cls):
        try:
            return steps_program(Mlp, forward=run, static_graph=static_graph)(cls)
        except RuntimeError as error:
            return type(error).__name__

    from tests.parity.compare import TorchDDP

    theirs, ours = attempt(TorchDDP), attempt(ddp_class)
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(theirs, list):
        for a, b in zip(ours, theirs, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_sequential(ddp_class, use_reentrant, static_graph):
    class Recomputed(nn.Sequential):
        def forward(self, x):
            return checkpoint_sequential(list(self), 2, x.requires_grad_(), use_reentrant=use_reentrant)

    def make():
        layers = [nn.Linear(8, 8, dtype=torch.float64) if i % 2 == 0 else nn.Tanh() for i in range(7)]
        return Recomputed(*layers)

    assert_same(ddp_class, steps_program(make, static_graph=static_graph))


# --- functional calls ---


@pytest.mark.parametrize("replaced", [{}, {"module.last.weight": 0.5}], ids=["all its own", "one replaced"])
def test_functional_call_of_the_wrapper(ddp_class, replaced):
    """A parameter that is replaced gets no gradient; the search for unused ones sees to the others."""

    def run(ddp, x):
        values = dict(ddp.named_parameters())
        values |= {name: torch.full_like(values[name], value) for name, value in replaced.items()}
        return torch.func.functional_call(ddp, values, (x,))

    assert_same(ddp_class, steps_program(Mlp, forward=run, find_unused_parameters=bool(replaced)))


# --- other kinds of modules ---


def test_scripted_submodule(ddp_class):
    def make():
        model = Mlp()
        model.middle = torch.jit.script(model.middle)
        return model

    assert_same(ddp_class, steps_program(make, bucket_cap_mb=0.001))


def test_lazy_modules_once_they_are_initialised(ddp_class):
    """Uninitialised ones are refused, by name: tests/fault/test_bad_input.py."""

    def make():
        model = nn.Sequential(nn.LazyLinear(6, dtype=torch.float64), nn.Tanh(), nn.LazyLinear(2, dtype=torch.float64))
        model(torch.zeros(1, 8, dtype=torch.float64))
        return model

    assert_same(ddp_class, steps_program(make))


def test_custom_autograd_function_and_hooks_on_gradients(ddp_class):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def make():
        model = Mlp()
        model.middle.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))  # of the local gradient, as in torch
        return model

    assert_same(ddp_class, steps_program(make, forward=lambda ddp, x: Doubled.apply(ddp(x))))


# --- steps ---


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_clipping(ddp_class, norm, foreach):
    def clip(ddp):
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5, norm_type=norm, error_if_nonfinite=True, foreach=foreach)

    sgd = lambda ddp: torch.optim.SGD(ddp.parameters(), lr=0.1)  # noqa: E731
    assert_same(ddp_class, steps_program(Mlp, sgd, after_backward=clip, bucket_cap_mb=0.001))


@pytest.mark.parametrize("optim", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_optimizers(ddp_class, optim):
    assert_same(ddp_class, steps_program(Mlp, lambda ddp: optim(ddp.parameters(), lr=0.01, fused=True)))


def test_post_accumulate_hooks_see_the_gradient_before_it_is_averaged(ddp_class):
    """What a hook on a parameter reads is this rank's own in both classes; so an optimizer in it is none of DDP's."""

    def program(cls):
        ddp = cls(seeded(Mlp))
        seen = {}
        for name, parameter in ddp.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
        loss_of(ddp(batch(dist.get_rank()))).backward()
        return [dict(seen), grads_of(ddp)]

    assert_same(ddp_class, program, reductions=1)


# --- torch.profiler ---


def profiled(cls, path: Path, rank: int):
    ddp = cls(seeded(Mlp), bucket_cap_mb=0.001)
    trace = path / f"{cls.__module__}-{rank}.json"
    ready = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
        on_trace_ready=lambda p: ready.append(p.export_chrome_trace(str(trace))),
        with_stack=True,
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for step in range(4):
            with torch.profiler.record_function("my step"):
                loss_of(ddp(batch(rank, step))).backward()
            profiler.step()
    assert len(ready) == 1
    return ddp, json.loads(trace.read_text())["traceEvents"]


@on_ranks(2)
def test_profiler_with_a_schedule_stacks_and_a_trace(rank, tmp_path):
    """Valid JSON, with torch's range of forward, the user's own, and ours of each bucket inside the step."""
    import torchddp

    ddp, events = profiled(torchddp.DDP, tmp_path, rank)
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert names.count("DistributedDataParallel.forward") == 2
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("name") == "my step" and e["ph"] == "X")
    buckets = len(ddp.reducer.plan.buckets)
    assert len(spans) == 2 and buckets > 1
    for index in range(buckets):
        for what in ("launch", "wait"):
            mine = [e for e in events if e.get("name", "").startswith(f"torchddp.{what} bucket {index} (")]
            assert len(mine) == 2, (what, index, len(mine))
            for begin, end in spans:
                assert sum(begin <= e["ts"] <= end for e in mine if e["ph"] == "X") == 1
    assert any("test_torch_modules.py" in name for name in names)  # with_stack: the frames of Python


@on_ranks(2)
def test_torchs_names_are_there_too(rank, tmp_path):
    """What a script looks for in a trace of torch's class it finds in one of ours."""
    import torchddp
    from tests.parity.compare import TorchDDP

    ours = {event["name"] for event in profiled(torchddp.DDP, tmp_path, rank)[1]}
    theirs = {event["name"] for event in profiled(TorchDDP, tmp_path, rank)[1]}
    wanted = {n for n in theirs if n.startswith(("DistributedDataParallel", "gloo:", "my step"))}
    assert wanted and wanted <= ours, wanted - ours
