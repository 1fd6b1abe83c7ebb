"""torchddp.replicate() trains as torchddp.DistributedDataParallel and torch's class do."""

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import on_ranks, run_ranks
from tests.models import Branches, Mlp, NormNet, batch, loss_of, seeded

COPIES = {"transport": "c10d", "gradient_as_bucket_view": False}
pytestmark = pytest.mark.beyond_torch("has no replicate() with our engine")
SECONDS = 120.0


def train(model, rank, steps=4, optimizer=None, **options):
    """Gradients of the last step; the parameters have been updated in each."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(**options)
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()


def assert_same(model, reference, **tolerance):
    """Parameters and gradients, bit for bit unless told otherwise."""
    reference = getattr(reference, "module", reference)
    named = dict(reference.named_parameters())
    assert set(named) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for mine, theirs in ((parameter, named[name]), (parameter.grad, named[name].grad)):
            if theirs is None:
                assert mine is None, name
            else:
                torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


@on_ranks(1, 2, 3, 4)
def test_same_bits_as_the_wrapper(rank):
    def one_run(rank, options):
        model = seeded(Mlp)
        parameters = list(model.parameters())
        before = torchddp.finished_steps()
        assert torchddp.replicate(model, **options) is model
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        train(model, rank)
        assert torchddp.finished_steps() - before == 4
        wrapped = torchddp.DistributedDataParallel(seeded(Mlp), **options)
        train(wrapped, rank)
        assert_same(model, wrapped)

    for options in ({}, {"bucket_cap_mb": 0.001}, COPIES):
        one_run(rank, options)


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_as_torchs_class(rank, world_size):
    model, torchs = torchddp.replicate(seeded(Mlp), transport="c10d"), TorchDDP(seeded(Mlp))
    for _ in range(2):
        train(model, rank)
        train(torchs, rank)
    # gloo's sums of more than two have no one order
    assert_same(model, torchs, **({} if world_size <= 2 else {"rtol": 1e-12, "atol": 1e-12}))


@on_ranks(2)
def test_the_module_stays_what_it_is():
    model, plain = torchddp.replicate(seeded(NormNet)), seeded(NormNet)
    assert isinstance(model, NormNet) and isinstance(model, torchddp.composable.ReplicateModule)
    assert not isinstance(model, TorchDDP)
    assert type(model).__name__ == "ReplicateNormNet"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    model.load_state_dict(plain.state_dict())
    torchddp.check_parameters(torchddp.composable.engine_of(model))

    sequential = torchddp.replicate(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    part = sequential[:2]
    assert type(part) is nn.Sequential and part[0] is sequential[0]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_optimizer_made_before_or_after(rank, when, set_to_none):
    model, wrapped = seeded(Mlp), torchddp.DistributedDataParallel(seeded(Mlp))
    optimizer = torch.optim.AdamW(model.parameters()) if when == "before" else None
    torchddp.replicate(model)
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    train(model, rank, optimizer=optimizer, set_to_none=set_to_none)
    train(wrapped, rank, optimizer=torch.optim.AdamW(wrapped.parameters()), set_to_none=set_to_none)
    assert_same(model, wrapped)


def accumulate(model, rank, how):
    """Three microbatches; the last is synchronised. Returns how many times the reducer has run."""
    before = torchddp.finished_steps()
    for micro in range(3):
        last = micro == 2
        if how == "no_sync":
            with contextlib.ExitStack() as stack:
                if not last:
                    stack.enter_context(model.no_sync())
                loss_of(model(batch(rank, micro))).backward()
            continue
        if how == "flag":
            model.set_requires_gradient_sync(last)
        loss = loss_of(model(batch(rank, micro)))
        if how == "late flag":
            model.set_requires_gradient_sync(last)
        loss.backward()
        if how == "late flag":
            model.set_requires_gradient_sync(False)
    return torchddp.finished_steps() - before


@pytest.mark.parametrize("how", ["flag", "no_sync", "late flag"])
@on_ranks(2)
def test_accumulation(rank, how):
    model, wrapped = torchddp.replicate(seeded(Mlp)), torchddp.DistributedDataParallel(seeded(Mlp))
    if how == "late flag":
        model.set_requires_gradient_sync(False)
    for _ in range(3):
        assert accumulate(model, rank, how) == 1
        assert accumulate(wrapped, rank, "no_sync") == 1
        assert_same(model, wrapped)
        model.zero_grad()
        wrapped.zero_grad()


@on_ranks(1)
def test_no_sync_restores_what_was_set_before():
    model = torchddp.replicate(seeded(Mlp))
    engine = torchddp.composable.engine_of(model)
    model.set_requires_gradient_sync(False)
    with model.no_sync():
        pass
    assert not engine.require_backward_grad_sync
    model.set_requires_gradient_sync(True)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    assert engine.require_backward_grad_sync


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@on_ranks(2)
def test_unused_parameters(rank, options):
    model = torchddp.replicate(seeded(Branches), **options)
    wrapped = torchddp.DistributedDataParallel(seeded(Branches), **options)
    branches = ["left"] * 4 if "static_graph" in options else ["left", "right", "left", "right"]
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        branch = branches[(rank + step) % 4]
        for net in (model, wrapped):
            net.zero_grad()
            net(x, branch).sum().backward()
        assert_same(model, wrapped)


def test_buffers_are_those_of_the_first_rank():
    def work(rank):
        model, wrapped = torchddp.replicate(seeded(NormNet)), torchddp.DistributedDataParallel(seeded(NormNet))
        own = torchddp.replicate(seeded(NormNet), forward_sync_buffers=False)
        x = torch.randn(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        for _ in range(3):
            for net in (model, wrapped, own):
                net(x).sum().backward()
        assert_same(model, wrapped)
        torch.testing.assert_close(model.norm.running_mean, wrapped.module.norm.running_mean, rtol=0, atol=0)
        return own.norm.running_mean.clone()

    first, second = run_ranks(work, 2, timeout=SECONDS)
    assert not torch.equal(first, second)


def test_rank_zeros_weights_are_sent():
    def work(rank):
        model = seeded(Mlp)
        with torch.no_grad():
            model.last.weight.add_(rank)
        torchddp.replicate(model)
        return model.last.weight.detach().clone()

    first, second = run_ranks(work, 2, timeout=SECONDS)
    assert torch.equal(first, second)


def test_ignored_modules_and_parameters():
    def work(rank):
        model = seeded(Mlp)
        with torch.no_grad():
            model.middle.weight.fill_(float(rank))
        torchddp.replicate(model, ignored_modules=[model.middle], ignored_params=[model.last.weight])
        assert "_ddp_params_and_buffers_to_ignore" not in model.__dict__
        loss_of(model(batch(rank, 0))).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}, model.middle.weight[0, 0].item()

    (mine, low), (theirs, high) = run_ranks(work, 2, timeout=SECONDS)
    assert (low, high) == (0.0, 1.0)
    same = {name for name in mine if torch.equal(mine[name], theirs[name])}
    assert same == {"first.weight", "first.bias"}


@on_ranks(2)
def test_layers_by_themselves_then_the_rest(rank):
    """As models are given to fully_shard: each module reduces what is not inside of another."""
    model, wrapped = seeded(Mlp), torchddp.DistributedDataParallel(seeded(Mlp))
    torchddp.replicate(model.middle)
    before = torchddp.finished_steps()
    torchddp.replicate(model)
    train(model, rank, steps=2)
    assert torchddp.finished_steps() - before == 4
    engine = torchddp.composable.engine_of
    assert [s.name for s in engine(model).session.specs] == ["first.weight", "first.bias", "last.weight"]
    train(wrapped, rank, steps=2)
    assert_same(model, wrapped)
    model.set_requires_gradient_sync(False)
    assert not engine(model.middle).require_backward_grad_sync
    model.set_requires_gradient_sync(True, recurse=False)
    assert engine(model).require_backward_grad_sync and not engine(model.middle).require_backward_grad_sync


@on_ranks(2)
def test_copies_are_not_replicated():
    model = torchddp.replicate(seeded(NormNet))
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(nn.Sequential(model))[0]]
    for other in copies:
        assert type(other) is NormNet and not other._forward_hooks and not other._forward_pre_hooks
        assert set(vars(other)) == set(vars(seeded(NormNet)))
        before = torchddp.finished_steps()
        other(x).sum().backward()
        assert torchddp.finished_steps() == before
    assert isinstance(model, torchddp.composable.ReplicateModule)
    before = torchddp.finished_steps()
    model(x).sum().backward()
    assert torchddp.finished_steps() == before + 1
    again = torchddp.replicate(copies[0])
    again(x).sum().backward()
    assert torchddp.finished_steps() == before + 2


@on_ranks(2)
def test_unreplicate(rank):
    model = torchddp.replicate(seeded(Mlp))
    loss_of(model(batch(rank, 0))).backward()
    attributes = set(vars(seeded(Mlp)))
    assert torchddp.composable.unreplicate(model) is model
    assert type(model) is Mlp and set(vars(model)) == attributes
    before = torchddp.finished_steps()
    loss_of(model(batch(rank, 0))).backward()
    assert torchddp.finished_steps() == before
    with pytest.raises(TypeError, match="this Mlp is not replicated"):
        torchddp.composable.engine_of(model)
    torchddp.replicate(model)
    loss_of(model(batch(rank, 0))).backward()
    assert torchddp.finished_steps() == before + 1


@on_ranks(2)
def test_a_model_that_is_dropped_is_freed(rank):
    model = torchddp.replicate(seeded(Mlp), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    loss_of(model(batch(rank, 0)).double()).backward()
    engine = weakref.ref(torchddp.composable.engine_of(model))
    module = weakref.ref(model)
    del model
    gc.collect()
    assert module() is None and engine() is None


class Fails(Mlp):
    """Raises when it is told to."""

    error: type[BaseException] | None = None

    def forward(self, x):
        if self.error is not None:
            raise self.error("told to")
        return super().forward(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@on_ranks(2)
def test_goes_on_after_a_forward_that_failed(rank, error):
    model, wrapped = torchddp.replicate(seeded(Fails)), torchddp.DistributedDataParallel(seeded(Mlp))
    train(model, rank, steps=1)
    model.error = error
    with pytest.raises(error):
        model(batch(rank, 0))
    if error is ValueError:
        assert TorchDDP._active_ddp_module is None
    model.error = None
    train(model, rank, steps=2)
    assert TorchDDP._active_ddp_module is None
    train(wrapped, rank, steps=1)
    train(wrapped, rank, steps=2)
    assert_same(model, wrapped)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x, depth=2):
        return self(torch.tanh(self.layer(x)), depth - 1) if depth else x


@on_ranks(2)
def test_a_module_that_calls_itself(rank):
    torch.manual_seed(0)
    model = Recursive()
    reference = torchddp.DistributedDataParallel(copy.deepcopy(model))
    torchddp.replicate(model)
    x = torch.full((2, 4), float(rank + 1), dtype=torch.float64)
    for _ in range(2):
        before = torchddp.finished_steps()
        model(x).sum().backward()
        assert torchddp.finished_steps() - before == 1
        reference(x).sum().backward()
    assert_same(model, reference)


@on_ranks(2)
def test_checkpoint_state_dict_has_plain_keys(rank):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, plain = torchddp.replicate(seeded(Mlp)), seeded(Mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, rank, optimizer=optimizer)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    assert list(weights) == list(plain.state_dict())
    assert set(state["state"]) == set(dict(plain.named_parameters()))
    other = torchddp.replicate(seeded(Mlp))
    other_optimizer = torch.optim.AdamW(other.parameters())
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)
    train(model, rank, optimizer=optimizer)
    train(other, rank, optimizer=other_optimizer)
    assert_same(model, other)


@on_ranks(2)
def test_sync_context_and_check_parameters_every(rank):
    model = torchddp.replicate(seeded(Mlp), check_parameters_every=1)
    train(model, rank, steps=2)
    if rank == 1:
        with torch.no_grad():
            model.last.weight[0, 0] += 1
    with pytest.raises(torchddp.DesyncError, match=r"last\.weight"):
        train(model, rank, steps=1)


def test_import_torchddp_imports_none_of_it():
    code = "import torchddp, sys; assert not [m for m in sys.modules if m.startswith('torchddp.composable')]; "
    code += "assert 'torch.distributed.fsdp' not in sys.modules; from torchddp import replicate; print(replicate)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.rest_is_thorough("replicate*")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile(replicate)", "replicate(compile)", "module.compile"])
@on_ranks(2)
def test_compiled(rank, how):
    model, wrapped = seeded(Mlp), torchddp.DistributedDataParallel(seeded(Mlp))
    compiled = model
    if how == "replicate(compile)":
        compiled = torchddp.replicate(torch.compile(model, backend="aot_eager"))
        assert [n for n, _ in compiled.named_parameters()][0] == "_orig_mod.first.weight"  # as torch.compile names
    else:
        torchddp.replicate(model)
        if how == "module.compile":
            model.compile(backend="aot_eager")
        else:
            compiled = torch.compile(model, backend="aot_eager")
    before = torchddp.finished_steps()
    for step in range(4):
        compiled.zero_grad()
        loss_of(compiled(batch(rank, step))).backward()
    assert torchddp.finished_steps() - before == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for step in range(4):
        wrapped.zero_grad()
        loss_of(wrapped(batch(rank, step))).backward()
    assert_same(model, wrapped)


@on_ranks(2)
def test_torchddp_sync_takes_the_engine(rank):
    model, wrapped = torchddp.replicate(seeded(Mlp)), torchddp.DistributedDataParallel(seeded(Mlp))
    engine = torchddp.composable.engine_of(model)
    for strategy in ("single_auto_sync", "forced_sync"):
        for i in torchddp.sync.accumulate(engine, 3, strategy):
            loss_of(model(batch(rank, i))).backward()
        for i in torchddp.sync.accumulate(wrapped, 3, strategy):
            loss_of(wrapped(batch(rank, i))).backward()
        assert engine.reducer.stats()["finished"] == wrapped.reducer.stats()["finished"]
        assert_same(model, wrapped)
