"""torchddp.replicate() trains as torchddp.DistributedDataParallel and torch's class do; what it refuses."""

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
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import torchddp
from tests.harness import each, on_ranks
from tests.models import Branches, Mlp, NormNet, batch, loss_of, same_on_all_ranks, seeded
from torchddp.composable import ReplicateModule, engine_of, unreplicate

pytestmark = pytest.mark.beyond_torch("has no replicate() with our engine")


def both(make=Mlp, **options):
    """Replicated, and in our wrapper."""
    return torchddp.replicate(seeded(make), **options), torchddp.DistributedDataParallel(seeded(make), **options)


def train(model, rank, steps=4, optimizer=None, **zero_grad):
    """The parameters are updated in each step; gradients of the last stay."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(**zero_grad)
        loss_of(model(batch(rank, step))).backward()
        optimizer.step()


def assert_same(model, reference, tolerance=0.0):
    """Parameters and gradients."""
    named = dict(getattr(reference, "module", reference).named_parameters())
    assert set(named) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for mine, theirs in ((parameter, named[name]), (parameter.grad, named[name].grad)):
            assert (mine is None) == (theirs is None), name
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=name)


@contextlib.contextmanager
def reductions(count):
    before = torchddp.finished_steps()
    yield
    assert torchddp.finished_steps() - before == count


@on_ranks(1, 2, 3, 4)
def test_same_bits_as_the_wrapper_and_as_torchs_class(rank, world_size):
    for options in each([{"transport": "c10d"}, {"transport": "c10d", "gradient_as_bucket_view": False}, {}]):
        model = seeded(Mlp)
        parameters = list(model.parameters())
        with reductions(4):
            assert torchddp.replicate(model, bucket_cap_mb=0.001, **options) is model
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            train(model, rank)
        wrapped = torchddp.DistributedDataParallel(seeded(Mlp), bucket_cap_mb=0.001, **options)
        train(wrapped, rank)
        assert_same(model, wrapped)
    torchs = TorchDDP(seeded(Mlp))
    train(torchs, rank)
    assert_same(model, torchs, 1e-12 if world_size > 2 else 0)  # gloo's sums of more than two have no one order


@on_ranks(2)
def test_the_module_stays_what_it_is_and_is_freed(rank):
    # The module stays what it is.
    model, plain = torchddp.replicate(seeded(NormNet)), seeded(NormNet)
    assert isinstance(model, NormNet) and isinstance(model, torchddp.composable.ReplicateModule)
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

    # A model that is dropped is freed.
    model = torchddp.replicate(seeded(Mlp), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    loss_of(model(batch(rank, 0)).double()).backward()
    freed = [weakref.ref(engine_of(model)), weakref.ref(model)]
    del model
    gc.collect()
    assert [ref() for ref in freed] == [None, None]


@on_ranks(2)
def test_optimizers_and_checkpoints(rank):
    # Optimizer made before or after.
    for before, set_to_none in each([True, False], [True, False]):
        model, wrapped = seeded(Mlp), torchddp.DistributedDataParallel(seeded(Mlp))
        optimizer = torch.optim.AdamW(model.parameters()) if before else None
        torchddp.replicate(model)
        optimizer = optimizer or torch.optim.AdamW(model.parameters())
        train(model, rank, optimizer=optimizer, set_to_none=set_to_none)
        train(wrapped, rank, optimizer=torch.optim.AdamW(wrapped.parameters()), set_to_none=set_to_none)
        assert_same(model, wrapped)

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
    train(model, rank, optimizer=optimizer)
    train(other, rank, optimizer=other_optimizer)
    assert_same(model, other)


def accumulate(model, rank, how):
    """Three microbatches; the last is synchronised."""
    for micro in range(3):
        last = micro == 2
        if how == "flag":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if how == "no_sync" and not last else contextlib.nullcontext():
            loss = loss_of(model(batch(rank, micro)))
            if how == "late flag":
                model.set_requires_gradient_sync(last)
            loss.backward()
        if how == "late flag":
            model.set_requires_gradient_sync(False)


@on_ranks(2)
def test_accumulation(rank):
    for how in each(["flag", "no_sync", "late flag"]):
        model, wrapped = both()
        if how == "late flag":
            model.set_requires_gradient_sync(False)
        for _ in range(3):
            with reductions(1):
                accumulate(model, rank, how)
            accumulate(wrapped, rank, "no_sync")
            assert_same(model, wrapped)
            model.zero_grad()
            wrapped.zero_grad()

    # torchddp.sync takes the engine.
    model, wrapped = both()
    engine = engine_of(model)
    for strategy in ("single_auto_sync", "forced_sync"):
        for i in torchddp.sync.accumulate(engine, 3, strategy):
            loss_of(model(batch(rank, i))).backward()
        for i in torchddp.sync.accumulate(wrapped, 3, strategy):
            loss_of(wrapped(batch(rank, i))).backward()
        assert engine.reducer.stats()["finished"] == wrapped.reducer.stats()["finished"]
        assert_same(model, wrapped)

    # no_sync() restores what was set before.
    model.set_requires_gradient_sync(False)
    with model.no_sync():
        pass
    assert not engine.require_backward_grad_sync
    model.set_requires_gradient_sync(True)
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    assert engine.require_backward_grad_sync


@on_ranks(2)
def test_unused_parameters_and_buffers(rank):
    for options in each([{"find_unused_parameters": True}, {"static_graph": True}]):
        model, wrapped = both(Branches, **options)
        for step in range(3):
            branch = ("left", "right")[(rank + step) % 2 if "static_graph" not in options else 0]
            for net in (model, wrapped):
                net.zero_grad()
                net(batch(rank, step, 3, 4), branch).sum().backward()
            assert_same(model, wrapped)
    model, wrapped = both(NormNet)
    own = torchddp.replicate(seeded(NormNet), forward_sync_buffers=False)
    for _ in range(3):
        for net in (model, wrapped, own):
            net(batch(rank, 0, 4, 3, 6, 6)).sum().backward()
    assert_same(model, wrapped)
    assert torch.equal(model.norm.running_mean, wrapped.module.norm.running_mean)
    assert not same_on_all_ranks([own.norm.running_mean])


@on_ranks(2)
def test_parts_by_themselves(rank):
    # Rank 0's weights are sent, but for what is ignored.
    model = seeded(Mlp)
    with torch.no_grad():
        model.last.weight.add_(rank)
    torchddp.replicate(model)
    assert same_on_all_ranks(model.parameters())

    model = seeded(Mlp)
    model.middle.weight.data.fill_(float(rank))
    torchddp.replicate(model, ignored_modules=[model.middle], ignored_params=[model.last.weight])
    assert "_ddp_params_and_buffers_to_ignore" not in model.__dict__
    loss_of(model(batch(rank, 0))).backward()
    assert model.middle.weight.eq(rank).all()
    same = {name for name, p in model.named_parameters() if same_on_all_ranks([p.grad])}
    assert same == {"first.weight", "first.bias"}

    # As models are given to fully_shard: each module reduces what is not inside of another.
    model, wrapped = seeded(Mlp), torchddp.DistributedDataParallel(seeded(Mlp))
    torchddp.replicate(model.middle)
    torchddp.replicate(model)
    with reductions(4):
        train(model, rank, steps=2)
    assert [s.name for s in engine_of(model).session.specs] == ["first.weight", "first.bias", "last.weight"]
    train(wrapped, rank, steps=2)
    assert_same(model, wrapped)
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
    assert isinstance(model, torchddp.composable.ReplicateModule)
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

    # check_parameters_every=
    model = torchddp.replicate(seeded(Mlp), check_parameters_every=1)
    train(model, rank, steps=2)
    with torch.no_grad():
        model.last.weight[0, 0] += rank
    with pytest.raises(torchddp.DesyncError, match=r"last\.weight"):
        train(model, rank, steps=1)


class Fails(Mlp):
    """Raises when it is told to."""

    error: type[BaseException] | None = None

    def forward(self, x):
        if self.error is not None:
            raise self.error("told to")
        return super().forward(x)


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
        model, wrapped = both(Fails)
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
    model, wrapped = both(Recursive)
    for step in range(2):
        with reductions(1):
            model(batch(rank, step, 2, 4)).sum().backward()
        wrapped(batch(rank, step, 2, 4)).sum().backward()
    assert_same(model, wrapped)


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
    with reductions(4):
        train(compiled, rank)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    train(wrapped, rank)
    assert_same(model, wrapped)


WRONG_OPTIONS = [
    ({"bucket_cap": 25}, "no argument 'bucket_cap'; its options are .*bucket_cap_mb"),
    ({"mixed_precision": None}, "no argument 'mixed_precision': use mp_policy="),
    ({"process_group": None}, "no argument 'process_group': use mesh="),
    ({"device_ids": [0]}, "no argument 'device_ids': use device_id="),
    ({"device_id": "cuda"}, "device_id must be the number of a GPU or a torch.device, got str"),
    ({"ignored_modules": ["first"]}, "ignored_modules must be modules, got str"),
]


def sharded():
    model = seeded(Mlp)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def on_meta():
    with torch.device("meta"):
        return Mlp()


WRONG_MODULES = [
    (lambda: [Mlp()], TypeError, "needs a torch.nn.Module, got list"),
    (lambda: seeded(Mlp).requires_grad_(False), RuntimeError, "no parameter that requires grad .*rank 0"),
    (nn.ReLU, RuntimeError, "this ReLU has no parameter"),
    (on_meta, RuntimeError, r"5 parameters of this Mlp are on the meta device.*first.weight.*to_empty"),
    (lambda: torchddp.replicate(seeded(Mlp)), RuntimeError, "already replicated"),
    (lambda: torch_replicate(seeded(Mlp)), RuntimeError, r"given to torch's replicate\(\) already"),
    (sharded, RuntimeError, r"given to torch's fully_shard\(\) already"),
    (lambda: TorchDDP(seeded(Mlp)), RuntimeError, "is a DistributedDataParallel"),
    (lambda: nn.Sequential(torchddp.DDP(seeded(Mlp))), RuntimeError, r"contains a DistributedDataParallel \('0'\)"),
    (lambda: nn.ModuleList([Mlp()]), ValueError, "a ModuleList has no forward"),
]


@on_ranks(1)
def test_what_is_refused(rank):
    # Wrong options, modules and meshes.
    for options, message in each(WRONG_OPTIONS):
        model = seeded(Mlp)
        with pytest.raises(TypeError, match=message):
            torchddp.replicate(model, **options)
        assert type(model) is Mlp and set(vars(model)) == set(vars(seeded(Mlp)))
    for make, error, message in each(WRONG_MODULES):
        with pytest.raises(error, match=message):
            torchddp.replicate(make())
    with pytest.raises(ValueError, match=r"shape \(1, 1\) with dimensions dp, tp.*mesh\['dp'\]"):
        torchddp.replicate(seeded(Mlp), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))
    with pytest.raises(ValueError, match=r"dimensions 0, 1.*after giving them names"):
        torchddp.replicate(seeded(Mlp), mesh=init_device_mesh("cpu", (1, 1)))

    # Later calls that can't be.
    model = torchddp.replicate(seeded(Mlp))
    engine = engine_of(model)
    with pytest.raises(RuntimeError, match=r"rank 0: .* can't be used with join\(\)"):
        engine.join()
    with pytest.raises(RuntimeError, match="call the module"):
        engine(batch(rank, 0))
    with pytest.raises(TypeError, match="this Linear is not replicated"):
        engine_of(model.first)
    with pytest.raises(TypeError, match="this str is not replicated"):
        engine_of("model")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match=r"given to fully_shard\(\) after torchddp.replicate\(\)"):
        model(batch(rank, 0))


@on_ranks(2)
def test_inside_of_checkpoints_and_beside_fully_shard(rank):
    # Inside activation checkpointing.
    model, wrapped = Outer(False), torchddp.DistributedDataParallel(Outer(False))
    torchddp.replicate(model.body)
    for step in range(3):
        before = torchddp.finished_steps()
        loss_of(model(batch(rank, step))).backward()
        assert torchddp.finished_steps() - before == 1
        loss_of(wrapped(batch(rank, step))).backward()
    assert_same_grads(model, wrapped)

    model = Outer(True)
    torchddp.replicate(model.body)
    with pytest.raises(RuntimeError, match="use_reentrant=False, or replicate the model as a whole"):
        loss_of(model(batch(rank, 0).requires_grad_())).backward()

    # Parts that fully_shard manages are left to it.
    model, wrapped = seeded(Mlp), torchddp.DistributedDataParallel(seeded(Mlp))
    fully_shard(model.middle, mesh=init_device_mesh("cpu", (2,)))
    torchddp.replicate(model)
    assert [s.name for s in engine_of(model).session.specs] == ["first.weight", "first.bias", "last.weight"]
    for step in range(3):
        for net in (model, wrapped):
            net.zero_grad()
            loss_of(net(batch(rank, step))).backward()
    assert_same_grads(model, wrapped)
    assert isinstance(model, ReplicateModule)

    # A model that differs between ranks.
    with pytest.raises(RuntimeError, match="not the same on all ranks"):
        torchddp.replicate(Mlp(width=8 + rank))


class Outer(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body = seeded(Mlp)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def assert_same_grads(model, wrapped):
    for mine, theirs in zip(model.parameters(), wrapped.parameters(), strict=True):
        grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        assert torch.equal(grad, theirs.grad)
