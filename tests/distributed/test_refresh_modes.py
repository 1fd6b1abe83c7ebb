"""refresh_trainable() with hooks, modes, observers and gradients in flight."""

import copy
import itertools
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchddp
from tests.harness import each, on_ranks
from tests.models import Mlp, batch, loss_of, same_on_all_ranks, seeded, step_on
from tests.oss import float_mlp as mlp
from torchddp import Checks
from torchddp.comm_hooks import BF16, Int8, PerParameter, PowerSGD

DDP = torchddp.DistributedDataParallel
KINDS = [DDP, torchddp.replicate]


float_step = partial(step_on, dtype=torch.float32)


def train(model, rank, steps=3, optimizer=None, dtype=torch.float32):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        step_on(model, rank, step, dtype)
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all_ranks([p for p in model.parameters() if p.requires_grad])


def grow(module):
    """Another layer after the last."""
    module.extra = nn.Linear(8, 8)
    module.last.register_forward_hook(lambda *args: module.extra(args[2]))


def set_first(on, *models):
    """Freezes or thaws the first layer."""
    for model in models:
        getattr(model, "module", model).first.requires_grad_(on)
        model.refresh_trainable()


def frozen_then_thawed(model, rank, **kwargs):
    """Train with fewer parameters, then with all again."""
    weight = getattr(model, "module", model).first.weight
    train(model, rank, **kwargs)
    set_first(False, model)
    before = weight.clone()
    train(model, rank, **kwargs)
    assert torch.equal(before, weight)
    set_first(True, model)
    train(model, rank, **kwargs)
    assert not torch.equal(before, weight)


def assert_same_gradients(models, modules, step, **tolerance):
    """Run `step` on two models of these modules while the first layer is frozen and thawed; compare gradients."""
    for on in (True, False, True):
        for module in modules:
            module.first.requires_grad_(on)
        for model in models:
            model.refresh_trainable()
        for model in models[-2:]:
            step(model)
        grads = [[getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in m.parameters()] for m in modules]
        torch.testing.assert_close(*grads, **tolerance)
        for module in modules:
            module.zero_grad()


def names_of(model):
    return {spec.name for spec in model.session.specs}


@on_ranks(3)
def test_only_what_is_new_gets_rank_0s_values(rank):
    for kind, transport in each(KINDS, ["shm", "c10d"]):
        module = seeded(mlp)
        model = kind(module, transport=transport)
        with torch.no_grad():
            module.first.weight.add_(rank)  # local values, which must not change
        own = module.first.weight.clone()
        torch.manual_seed(rank)
        module.extra = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        module.extra[1].running_mean.fill_(rank + 1)
        module.extra.requires_grad_(False)  # frozen parameters must be equal too
        module.register_parameter("scale", nn.Parameter(torch.randn(5)))
        model.refresh_trainable()
        assert torch.equal(module.first.weight, own)
        assert same_on_all_ranks([*module.extra.parameters(), module.scale])
        assert module.extra[1].running_mean.tolist() == [1.0] * 4
    module = seeded(mlp)
    model = DDP(module, init_sync=False)
    module.register_parameter("scale", nn.Parameter(torch.full((2,), float(rank))))
    model.refresh_trainable()
    assert module.scale.tolist() == [rank, rank]


class Hook:
    called = 0
    followed = 0

    def __call__(self, state, bucket):
        self.called += 1
        return default_hooks.allreduce_hook(state, bucket)

    def follow_parameters(self, model):
        self.followed += 1


@on_ranks(2)
def test_hooks_are_kept(rank):
    hook = Hook()
    model = DDP(seeded(mlp))
    model.register_comm_hook(None, hook)
    frozen_then_thawed(model, rank)
    assert hook.called >= 9 and hook.followed == 2
    assert model._get_ddp_logging_data()["comm_hook"] == "Hook"
    for kind in each([dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS]):
        model = DDP(seeded(mlp), transport="shm")
        model._register_builtin_comm_hook(kind)
        frozen_then_thawed(model, rank)
        assert model._get_ddp_logging_data()["comm_hook"] == str(kind)
        assert "hook" in model.reducer.traffic()

    # torch's PowerSGD restarts: its state is keyed by the index of buckets that no longer exist.
    state = torch_power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    model = DDP(seeded(mlp))
    model.register_comm_hook(state, torch_power_sgd.powerSGD_hook)
    train(model, rank, steps=6)
    assert state.error_dict
    frozen_then_thawed(model, rank, steps=6)
    assert state.error_dict and state.iter == 6

    # A hook that was refused, here on one rank, is neither compared nor registered again.
    model = DDP(seeded(mlp), comm_hook=hook)
    refused = [partial(model.register_comm_hook, None, Hook())]
    refused += [partial(model._register_builtin_comm_hook, dist.BuiltinCommHookType.ALLREDUCE)]
    for register in refused if rank == 0 else ():
        with pytest.raises(RuntimeError, match="can only be called once"):
            register()
    frozen_then_thawed(model, rank)
    assert model._get_ddp_logging_data()["comm_hook"] == "Hook"


HOOKS = [
    Int8,
    lambda: BF16(error_feedback=True),
    lambda: PowerSGD(2),
    lambda: PerParameter(Int8(), [("*.bias", None), ("last.*", PowerSGD(2))]),
]


def held_by(state):
    """A hook's residuals by parameter."""
    found = {(kind, name): value for kind in ("residual", "factors") for name, value in state.get(kind, {}).items()}
    for inner in state.get("hooks", ()):
        found |= held_by(inner)
    return found


@on_ranks(2, 3)
def test_hooks_keep_residuals_of_parameters_that_stay(rank):
    for make in each(HOOKS):
        hook, module = make(), seeded(mlp)
        model = DDP(module, comm_hook=hook)
        train(model, rank)
        before, steps = held_by(hook.state_dict()), hook.state_dict()["step"]
        assert any(parameter == "last.weight" for _, parameter in before)
        module.first.requires_grad_(False)
        grow(module)
        model.refresh_trainable()
        after = held_by(hook.state_dict())
        assert after and after.keys() == {k for k in before if not k[1].startswith("first.")}
        assert all(torch.equal(after[key], before[key]) for key in after)
        assert hook.state_dict()["step"] == steps == 3
        train(model, rank)
        assert hook.state_dict()["step"] == 6


@on_ranks(2)
def test_optimizers_in_backward_and_torchs_mixed_precision(rank):
    # Optimizers in backward. A CPU has no streams, so all runs in order.
    torch.Stream = torch.Event = torch.accelerator.current_stream = mock.MagicMock()
    module, plain = seeded(mlp), seeded(mlp)
    options = {"lr": 0.1, "momentum": 0.9}
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), options)
    model, reference = DDP(module), DDP(plain)
    optimizer = torch.optim.SGD(plain.parameters(), **options)

    def train_both():
        for step in range(3):
            for side in (model, reference):
                float_step(side, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(list(module.parameters()), list(plain.parameters()))

    train_both()
    set_first(False, model, reference)
    train_both()
    for side in (module, plain):
        torch.manual_seed(1)
        grow(side)
    _apply_optimizer_in_backward(torch.optim.SGD, module.extra.parameters(), options)
    optimizer.add_param_group({"params": list(plain.extra.parameters())})
    set_first(True, model, reference)
    train_both()
    assert all(p.grad is None for p in module.parameters())

    # torch's mixed precision.
    precision = torch.nn.parallel.distributed._MixedPrecision(*[torch.bfloat16] * 3)
    model = DDP(seeded(mlp), mixed_precision=precision)
    frozen_then_thawed(model, rank)
    module = model.module
    grow(module)
    model.refresh_trainable()
    before = module.extra.weight.clone()
    train(model, rank)
    assert not torch.equal(module.extra.weight, before) and module.extra.weight.dtype == torch.float32


@on_ranks(2)
def test_options_are_kept(rank):
    # An optimizer that a hook runs.
    model = DDP(seeded(mlp))
    model._register_fused_optim(torch.optim.SGD, 0.1)
    before = model.module.last.weight.clone()
    for frozen in (False, True, False):
        set_first(not frozen, model)
        float_step(model, rank)
        assert same_on_all_ranks(list(model.parameters()))
    assert not torch.equal(before, model.module.last.weight)

    # Copies.
    model = DDP(seeded(mlp), comm_hook="bf16")
    model.refresh_trainable()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        frozen_then_thawed(copied, rank)
        assert not copied._comm_hooks
    frozen_then_thawed(model, rank)


@on_ranks(2)
def test_parameters_that_are_averaged_later_ignored_or_shared(rank):
    # Parameters that are averaged later.
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    late = [("2.bias", module[2].bias)]
    model = DDP(module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[0].weight)
    train(model, rank)
    module[1].requires_grad_(False)
    model.refresh_trainable()
    train(model, rank)
    assert names_of(model) == {"0.weight", "0.bias", "2.weight"}

    # Ignored parameters.
    module = seeded(mlp)
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["first.weight"])
    model = DDP(module)
    module.extra, module.own = nn.Linear(2, 2), nn.Linear(2, 2)
    DDP._set_params_and_buffers_to_ignore_for_model(module, ["own.weight", "own.bias", "absent"])
    torch.manual_seed(rank)
    nn.init.normal_(module.own.weight)
    model.refresh_trainable()
    assert names_of(model) == {n for n, _ in module.named_parameters()} - {"first.weight", "own.weight", "own.bias"}
    assert ".absent" not in model.parameters_to_ignore
    assert not same_on_all_ranks([module.own.weight])

    # Compiled submodules.
    modules = seeded(mlp), seeded(mlp)
    models = DDP(torch.compile(modules[0], backend="eager")), DDP(modules[1])
    assert_same_gradients(models, modules, partial(float_step, rank=rank), rtol=0, atol=0)


@on_ranks(2)
def test_gradients_in_flight(rank):
    # The current reducer reduces the backward of a forward from before the change.
    for search, frozen in each(itertools.product((False, True), repeat=2)):
        module = seeded(Mlp)
        module.first.requires_grad_(not frozen)
        model = DDP(module, find_unused_parameters=search)
        output = model(batch(rank))
        module.first.requires_grad_(True)
        model.refresh_trainable()
        loss_of(output).backward()
        assert same_on_all_ranks([p.grad for p in module.last.parameters()])
        module.zero_grad()
        train(model, rank, dtype=torch.float64)

    # The old buckets are freed.
    model = DDP(seeded(Mlp))
    train(model, rank, dtype=torch.float64)
    before = model.reducer
    assert before.bucket_memory_bytes > 0
    model.refresh_trainable()
    assert before.bucket_memory_bytes == 0


@on_ranks(2)
def test_observers_are_kept(rank):
    # The step count continues.
    model = DDP(seeded(mlp), checks=Checks(gradient_stats=True, parameters_every=2, nonfinite=True, stall_report=20.0))
    train(model, rank)
    buckets = model.gradient_stats().shape
    frozen_then_thawed(model, rank)
    assert model.reducer.stats()["finished"] == model.reducer.stats()["iteration"] == 12
    assert model.gradient_stats().shape == buckets
    assert all(model.observers.get(name) for name in ("check_parameters", "find_nonfinite", "hang_reports"))
    assert model.reducer.status()["step"] == 12
    with torch.no_grad():
        model.module.last.weight.add_(rank)
    with pytest.raises(torchddp.DesyncError, match=r"after 12 synchronized steps"):
        torchddp.check_parameters(model)

    # A profile ends with the change.
    model = DDP(seeded(mlp))
    with torchddp.profiler.profile(model) as recorded:
        train(model, rank)
        set_first(False, model)
        train(model, rank)
    assert len(recorded.steps) == 3 and len(recorded.names) == 5


@on_ranks(2)
def test_replicated_modules(rank):
    # Replicated in lower precision.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = torchddp.replicate(seeded(mlp), mp_policy=policy)
    frozen_then_thawed(module, rank)
    grow(module)
    seen = []
    module.extra.register_forward_hook(lambda m, a, out: seen.append((m.weight.dtype, out.dtype)))
    module.refresh_trainable()
    train(module, rank)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert module.extra.weight.dtype == torch.float32
    torchddp.composable.unreplicate(module)
    assert not module.extra._forward_pre_hooks and not module.first._forward_pre_hooks

    # Ignored modules stay ignored when they grow.
    module = seeded(mlp)
    module.own = nn.Sequential(nn.Linear(2, 2))
    torchddp.replicate(module, ignored_modules=[module.own])
    module.own.append(nn.Linear(2, 3))
    module.extra = nn.Linear(2, 2)
    module.refresh_trainable()
    names = names_of(torchddp.composable.engine_of(module))
    assert {"extra.weight", "first.weight"} <= names and not any(name.startswith("own.") for name in names)


@on_ranks(4)
def test_replicate_with_dtensors(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module, plain = seeded(Mlp), seeded(Mlp)
    plan = {"first": ColwiseParallel(), "middle": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], plan)
    torchddp.replicate(module, mesh=mesh["dp"])

    def step(model):
        with model.no_sync():
            step_on(model, rank // 2, 7)
        step_on(model, rank // 2)

    assert_same_gradients([module, DDP(plain)], [module, plain], step)
