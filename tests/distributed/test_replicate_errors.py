"""What torchddp.replicate() refuses, and what it leaves to others."""

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import torchddp
from tests.harness import each, on_ranks
from tests.models import Mlp, batch, loss_of, seeded
from torchddp.composable import ReplicateModule, engine_of

pytestmark = pytest.mark.beyond_torch("has no replicate() with our engine")

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
    (lambda: [Mlp()], TypeError, "wants one torch.nn.Module, got list"),
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
def test_wrong_options_modules_and_meshes():
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


@on_ranks(2)
def test_a_model_that_differs_between_ranks(rank):
    with pytest.raises(RuntimeError, match="not the same on all ranks"):
        torchddp.replicate(Mlp(width=8 + rank))


@on_ranks(1)
def test_later_calls_that_can_not_be(rank):
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


@on_ranks(2)
def test_inside_of_activation_checkpointing(rank):
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


@on_ranks(2)
def test_parts_that_fully_shard_manages_are_left_to_it(rank):
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
