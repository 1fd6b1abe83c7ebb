"""torchddp.replicate() trains like torchddp.DistributedDataParallel; errors."""

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import torchddp
from tests.harness import assert_each_raises, each, on_ranks, reductions
from tests.models import Mlp, NormNet, assert_same_training, batch, same_on_all_ranks, seeded, step_on, train
from torchddp import Checks
from torchddp.composable import ReplicateModule, engine_of, unreplicate


def both(make=Mlp, **options):
    """The model replicated, and in our wrapper."""
    return torchddp.replicate(seeded(make), **options), torchddp.DDP(seeded(make), **options)


def assert_trains_alike(model, wrapped, rank, steps=4, optimizers=(None, None), **zero_grad):
    with reductions(steps):
        train(model, rank, steps, optimizers[0], **zero_grad)
    train(wrapped, rank, steps, optimizers[1], **zero_grad)
    assert_same_training(model, wrapped)


@on_ranks(2)
def test_the_module_keeps_its_class_and_is_freed(rank):
    model, plain = torchddp.replicate(seeded(NormNet)), seeded(NormNet)
    assert isinstance(model, NormNet) and isinstance(model, ReplicateModule)
    assert not isinstance(model, TorchDDP)
    assert type(model).__name__ == "ReplicateNormNet"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    model.load_state_dict(plain.state_dict())
    torchddp.check_parameters(engine_of(model))
    sequential = torchddp.replicate(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    part = sequential[:2]
    assert type(part) is nn.Sequential and part[0] is sequential[0]

    # A dropped model is freed.
    model = torchddp.replicate(seeded(Mlp), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(batch(rank, 0)).double().sum().backward()
    freed = [weakref.ref(engine_of(model)), weakref.ref(model)]
    del model
    gc.collect()
    assert [ref() for ref in freed] == [None, None]


@on_ranks(2)
def test_optimizers_and_checkpoints(rank):
    # Optimizer made before or after.
    for before, set_to_none in each([True, False], [True, False]):
        model, wrapped = seeded(Mlp), torchddp.DDP(seeded(Mlp))
        optimizer = torch.optim.AdamW(model.parameters()) if before else None
        torchddp.replicate(model)
        optimizer = optimizer or torch.optim.AdamW(model.parameters())
        optimizers = optimizer, torch.optim.AdamW(wrapped.parameters())
        assert_trains_alike(model, wrapped, rank, optimizers=optimizers, set_to_none=set_to_none)

    # State dicts of torch.distributed.checkpoint have plain keys.
    model, plain = torchddp.replicate(seeded(Mlp)), seeded(Mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, rank, optimizer=optimizer)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    assert list(weights) == list(plain.state_dict())
    assert set(state["state"]) == set(dict(plain.named_parameters()))
    other = torchddp.replicate(seeded(Mlp))
    other_optimizer = torch.optim.AdamW(other.parameters())
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)
    assert_trains_alike(model, other, rank, optimizers=(optimizer, other_optimizer))


def accumulate(model, rank, how):
    """Three microbatches; the last is synchronized."""
    for micro in range(3):
        last = micro == 2
        if how == "flag" or (how == "flag around" and not last):
            model.set_requires_gradient_sync(last)
        with model.no_sync() if how == "no_sync" and not last else contextlib.nullcontext():
            loss = model(batch(rank, micro)).square().sum()
            if how == "late flag":
                torch.autograd.grad(loss, list(model.parameters())[: 1 + micro], retain_graph=True)
                model.set_requires_gradient_sync(last)
            loss.backward()
        if how in ("late flag", "flag around"):
            model.set_requires_gradient_sync(how == "flag around")


@on_ranks(2)
def test_accumulation(rank):
    for how in each(["flag", "no_sync", "late flag", "flag around"]):
        model, wrapped = both()
        if how == "late flag":
            model.set_requires_gradient_sync(False)
        for _ in range(3):
            with reductions(1):
                accumulate(model, rank, how)
            accumulate(wrapped, rank, "no_sync")
            assert_same_training(model, wrapped)
            model.zero_grad()
            wrapped.zero_grad()

    # no_sync() restores what was set before.
    engine = engine_of(model)
    model.set_requires_gradient_sync(False)
    with model.no_sync():
        pass
    assert not engine.require_backward_grad_sync
    model.set_requires_gradient_sync(True)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    assert engine.require_backward_grad_sync


@on_ranks(2)
def test_evaluation_on_another_thread_meanwhile(rank):
    model, wrapped = both()
    begun, evaluated = threading.Event(), threading.Event()

    def evaluate():
        begun.wait(60)
        with torch.no_grad():
            model(batch(rank, 9))
        evaluated.set()

    def wait_for_it(*_):
        begun.set()
        assert evaluated.wait(60)

    thread = threading.Thread(target=evaluate)
    thread.start()
    hook = model.middle.register_forward_hook(
        lambda *_: None if threading.current_thread() is thread else wait_for_it()
    )
    for net in (model, wrapped):
        step_on(net, rank)
    thread.join()
    hook.remove()
    assert_same_training(model, wrapped)


@on_ranks(2)
def test_buffers(rank):
    model, wrapped = both(NormNet)
    own = torchddp.replicate(seeded(NormNet), forward_sync_buffers=False)
    for _ in range(3):
        for net in (model, wrapped, own):
            net(batch(rank, 0, 4, 3, 6, 6)).sum().backward()
    assert_same_training(model, wrapped)
    assert torch.equal(model.norm.running_mean, wrapped.module.norm.running_mean)
    assert not same_on_all_ranks([own.norm.running_mean])


@on_ranks(2)
def test_separately_replicated_parts(rank):
    # Rank 0's weights are sent, except ignored ones.
    model = seeded(Mlp)
    with torch.no_grad():
        model.last.weight.add_(rank)
    torchddp.replicate(model)
    assert same_on_all_ranks(model.parameters())

    model = seeded(Mlp)
    model.middle.weight.data.fill_(float(rank))
    torchddp.replicate(model, ignored_modules=[model.middle], ignored_params=[model.last.weight])
    assert "_ddp_params_and_buffers_to_ignore" not in model.__dict__
    step_on(model, rank)
    assert model.middle.weight.eq(rank).all()
    same = {name for name, p in model.named_parameters() if same_on_all_ranks([p.grad])}
    assert same == {"first.weight", "first.bias"}

    # As with fully_shard: each module reduces its parameters that are in no other replicated module.
    model, wrapped = seeded(Mlp), torchddp.DDP(seeded(Mlp))
    torchddp.replicate(model.middle)
    torchddp.replicate(model)
    with reductions(4):
        train(model, rank, steps=2)
    assert [s.name for s in engine_of(model).session.specs] == ["first.weight", "first.bias", "last.weight"]
    train(wrapped, rank, steps=2)
    assert_same_training(model, wrapped)
    model.set_requires_gradient_sync(False)
    assert not engine_of(model.middle).require_backward_grad_sync
    model.set_requires_gradient_sync(True, recurse=False)
    assert engine_of(model).require_backward_grad_sync and not engine_of(model.middle).require_backward_grad_sync


@on_ranks(2)
def test_copies_are_plain_and_parameters_are_checked(rank):
    # Copies, and what unreplicate() returns, are plain.
    model, x = torchddp.replicate(seeded(NormNet)), batch(rank, 0, 4, 3, 6, 6)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(nn.Sequential(model))[0]]
    for other in copies:
        assert type(other) is NormNet and not other._forward_hooks and not other._forward_pre_hooks
        assert set(vars(other)) == set(vars(seeded(NormNet)))
        with reductions(0):
            other(x).sum().backward()
    assert isinstance(model, ReplicateModule)
    for net in (model, torchddp.replicate(copies[0])):
        with reductions(1):
            net(x).sum().backward()
    assert unreplicate(model) is model
    assert type(model) is NormNet and set(vars(model)) == set(vars(seeded(NormNet)))
    with reductions(0):
        model(x).sum().backward()
    with pytest.raises(TypeError, match="this NormNet is not replicated"):
        engine_of(model)
    with reductions(1):
        torchddp.replicate(model)(x).sum().backward()

    # Parts of a model whose forward casts parameters.
    model = torchddp.replicate(seeded(Mlp), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for layer in (copy.deepcopy(model.first), pickle.loads(pickle.dumps(model.first))):
        layer(batch(rank, 0)).sum().backward()
        assert layer.weight.grad.dtype == torch.float64

    # check_parameters_every=
    model = torchddp.replicate(seeded(Mlp), checks=Checks(parameters_every=1))
    train(model, rank, steps=2)
    with torch.no_grad():
        model.last.weight[0, 0] += rank
    with pytest.raises(torchddp.DesyncError, match=r"last\.weight"):
        train(model, rank, steps=1)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x, depth=2):
        return self(torch.tanh(self.layer(x)), depth - 1) if depth else x


@on_ranks(2)
def test_a_forward_that_fails_and_one_that_calls_itself(rank):
    for error in each([ValueError, KeyboardInterrupt]):
        model, wrapped = both()
        assert_trains_alike(model, wrapped, rank, steps=1)
        hook = model.middle.register_forward_pre_hook(mock.Mock(side_effect=error("told to")))
        with pytest.raises(error, match="told to"):
            model(batch(rank, 0))
        if error is ValueError:
            assert TorchDDP._active_ddp_module is None
        hook.remove()
        assert_trains_alike(model, wrapped, rank, steps=2)
        assert TorchDDP._active_ddp_module is None
    model, wrapped = both(Recursive)
    for step in range(2):
        with reductions(1):
            model(batch(rank, step, 2, 4)).sum().backward()
        wrapped(batch(rank, step, 2, 4)).sum().backward()
    assert_same_training(model, wrapped)


@pytest.mark.rest_is_thorough("replicate*")
@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile(replicate)", "replicate(compile)", "module.compile"])
@on_ranks(2)
def test_compiled(rank, how):
    model, wrapped = seeded(Mlp), torchddp.DDP(seeded(Mlp))
    compiled = model
    if how == "replicate(compile)":
        compiled = torchddp.replicate(torch.compile(model, backend="aot_eager"))
        assert [n for n, _ in compiled.named_parameters()][0] == "_orig_mod.first.weight"  # torch.compile's prefix
    else:
        torchddp.replicate(model)
        if how == "module.compile":
            model.compile(backend="aot_eager")
        else:
            compiled = torch.compile(model, backend="aot_eager")
    with reductions(4):
        train(compiled, rank)
    train(wrapped, rank)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_same_training(model, wrapped)


def net():
    return seeded(Mlp)


def mesh(*shape, **names):
    return init_device_mesh("cpu", shape, **names)


WRONG_OPTIONS = [
    ({"bucket_cap": 25}, "argument 'bucket_cap'. Did you mean 'bucket_cap_mb'"),
    ({"mixed_precision": None}, "argument 'mixed_precision': use mp_policy="),
    ({"process_group": None}, "argument 'process_group': use mesh="),
    ({"device_ids": [0]}, "argument 'device_ids': use device_id="),
    ({"device_id": "cuda"}, "device_id must be the number of a GPU or a torch.device, got str"),
    ({"ignored_modules": ["first"]}, "ignored_modules must be modules, got str"),
]


@on_ranks(1)
def test_what_is_refused(rank):
    for options, message in each(WRONG_OPTIONS):
        model = net()
        with pytest.raises(TypeError, match=message):
            torchddp.replicate(model, **options)
        assert type(model) is Mlp and set(vars(model)) == set(vars(net()))
    named = mesh(1, 1, mesh_dim_names=("dp", "tp"))
    replicate, model = torchddp.replicate, torchddp.replicate(net())
    engine = engine_of(model)
    advice = "Pass one dimension, e.g. mesh['dp']"
    on_meta = "of this Mlp are on the meta device, without values (first.weight, first.bias,"
    assert_each_raises(
        (lambda: replicate([net()]), TypeError, "needs a torch.nn.Module, got list"),
        (lambda: replicate(net().requires_grad_(False)), RuntimeError, "grad and is not ignored (rank 0)"),
        (lambda: replicate(nn.ReLU()), RuntimeError, "this ReLU has no parameter"),
        (lambda: replicate(net().to("meta")), RuntimeError, f"parameters {on_meta}"),
        (lambda: replicate(model), RuntimeError, "already replicated"),
        (lambda: replicate(torch_replicate(net())), RuntimeError, "already given to torch's replicate()"),
        (lambda: replicate(fully_shard(net(), mesh=mesh(1))), RuntimeError, "already given to torch's fully_shard()"),
        (lambda: replicate(TorchDDP(net())), RuntimeError, "is a DistributedDataParallel"),
        (lambda: replicate(nn.Sequential(TorchDDP(net()))), RuntimeError, "contains a DistributedDataParallel ('0')"),
        (lambda: replicate(nn.ModuleList([net()])), ValueError, "a ModuleList has no forward"),
        (lambda: replicate(net(), mesh=named), ValueError, f"(1, 1) with dimensions dp, tp. {advice}"),
        (lambda: replicate(net(), mesh=mesh(1, 1)), ValueError, "e.g. mesh['0'], after giving them names"),
        (engine.join, RuntimeError, "rank 0: a replicated module can't be used with join()"),
        (lambda: engine(batch(rank, 0)), RuntimeError, "call the module"),
        (lambda: engine_of(model.first), TypeError, "this Linear is not replicated"),
        (lambda: engine_of("model"), TypeError, "this str is not replicated"),
    )
    fully_shard(model, mesh=mesh(1))
    with pytest.raises(RuntimeError, match=r"given to fully_shard\(\) after torchddp.replicate\(\)"):
        model(batch(rank, 0))


@on_ranks(2)
def test_inside_of_checkpoints_and_with_fully_shard(rank):
    # Inside activation checkpointing.
    model, wrapped = Outer(False), torchddp.DDP(Outer(False))
    torchddp.replicate(model.body)
    assert_trains_alike(model, wrapped, rank)
    for net in (model.body, wrapped):  # an evaluation between a forward without synchronization and its backward
        with net.no_sync():
            loss = (model if net is model.body else net)(batch(rank, 4)).square().sum()
            with torch.no_grad():
                net(batch(rank, 5))
            loss.backward()
    assert_trains_alike(model, wrapped, rank)

    model = Outer(True)
    torchddp.replicate(model.body)
    with pytest.raises(RuntimeError, match="use_reentrant=False, or replicate the model as a whole"):
        model(batch(rank, 0).requires_grad_()).sum().backward()
    model.reentrant = False
    model(batch(rank, 0)).sum().backward()
    model.reentrant = True  # switched on after a step
    with pytest.raises(RuntimeError, match="use_reentrant=False, or replicate the model as a whole"):
        model(batch(rank, 0).requires_grad_()).sum().backward()

    # Parts that fully_shard manages are ignored.
    model, wrapped = seeded(Mlp), torchddp.DDP(seeded(Mlp))
    fully_shard(model.middle, mesh=init_device_mesh("cpu", (2,)))
    torchddp.replicate(model)
    assert [s.name for s in engine_of(model).session.specs] == ["first.weight", "first.bias", "last.weight"]
    for step in range(3):
        for net in (model, wrapped):
            net.zero_grad()
            step_on(net, rank, step)
    assert_same_training(model, wrapped)
    assert isinstance(model, ReplicateModule)


class Outer(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body = seeded(Mlp)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)
