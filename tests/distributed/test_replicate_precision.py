"""torchddp.replicate(mp_policy=...) computes and reduces like torch's fully_shard with the same policy."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import torchddp
from tests.harness import each, on_ranks
from tests.models import Recurrent, assert_same_training
from torchddp import Precision
from torchddp.composable import ReplicateModule, unreplicate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Net(nn.Module):
    """A model with tied weights, a frozen parameter, an integer input and a dictionary as output."""

    def __init__(self, checkpointed=None):
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.tokens.weight
        self.norm.bias.requires_grad_(False)
        self.checkpointed = checkpointed
        self.seen = []

    def mlp(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, index, scale):
        self.seen = [self.up.weight.dtype, scale.dtype]
        x = self.norm(self.tokens(index)) * scale
        x = self.mlp(x) if self.checkpointed is None else checkpoint(self.mlp, x, use_reentrant=self.checkpointed)
        return {"logits": self.out(x)}


def replicated(*args, **policy):
    return torchddp.replicate(Net(*args), mp_policy=MixedPrecisionPolicy(**(policy or {"param_dtype": BF16})))


def step(model, rank, number=0, dtype=FP32):
    generator = torch.Generator().manual_seed(10 * number + rank)
    index = torch.randint(11, (4, 5), generator=generator)
    logits = model(index, torch.rand(4, 5, 1, generator=generator).to(dtype))["logits"]
    logits.float().square().mean().backward()
    return logits.dtype


def train(model, rank):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    dtypes = set()
    for number in range(3):
        optimizer.zero_grad()
        dtypes.add(step(model, rank, number))
        optimizer.step()
    return dtypes


POLICIES = [
    MixedPrecisionPolicy(param_dtype=BF16),
    MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    MixedPrecisionPolicy(param_dtype=FP16, output_dtype=FP32),
    MixedPrecisionPolicy(reduce_dtype=BF16),
]


@on_ranks(2)
def test_same_bits_as_fully_shard(rank):
    for policy in each(POLICIES):
        mine, theirs = Net(), Net()
        before = torchddp.finished_steps()
        torchddp.replicate(mine, mp_policy=policy)
        fully_shard(theirs, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        dtypes = train(mine, rank)
        assert dtypes == train(theirs, rank) == {policy.output_dtype or policy.param_dtype or FP32}
        assert mine.seen == theirs.seen == [policy.param_dtype or FP32] * 2
        assert torchddp.finished_steps() - before == 3
        assert_same_training(mine, theirs)
        assert all(type(p) is nn.Parameter and p.dtype == FP32 for p in mine.parameters())


@on_ranks(2)
def test_forwards_that_run_again_fail_or_do_not_cast_inputs(rank):
    # Activation checkpointing runs a part again.
    for reentrant in each([False, True]):
        mine, other = (replicated(*args, param_dtype=BF16, reduce_dtype=FP32) for args in ((reentrant,), ()))
        train(mine, rank)
        train(other, rank)
        assert_same_training(mine, other)

    # Parameters are restored after a failed forward.
    model = replicated()
    with pytest.raises(TypeError, match="must be Tensor, not str"):
        model("no tensor", torch.ones(1))
    assert all(p.dtype == FP32 and p.requires_grad for p in model.up.parameters())
    step(model, rank)
    with torch.no_grad():
        assert model(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1))["logits"].dtype == BF16

    # Inputs are not cast if the policy says so.
    model = replicated(param_dtype=BF16, cast_forward_inputs=False)
    with pytest.raises(RuntimeError, match="dtype"):  # a matrix product of two dtypes
        step(model, rank)
    assert model.seen == [BF16, FP32]


@on_ranks(2)
def test_gradients_accumulate_in_the_parameters_own_dtype(rank):
    model, alone = replicated(param_dtype=BF16, reduce_dtype=FP32), Net().bfloat16()
    alone.load_state_dict(model.state_dict())
    wanted = {name: torch.zeros(p.shape) for name, p in alone.named_parameters() if p.requires_grad}
    for number in range(4):
        model.set_requires_gradient_sync(number == 3)
        step(model, rank, number)
        for replica in (0, 1):
            alone.zero_grad()
            step(alone, replica, number, BF16)
            for name in wanted:
                wanted[name] += alone.get_parameter(name).grad.float() / 2
    for name, value in wanted.items():
        torch.testing.assert_close(model.get_parameter(name).grad, value, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_recurrent_layers_copies_and_conflicts(rank):
    # Recurrent layers.
    model = torchddp.replicate(Recurrent(4, 8), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    for _ in range(2):
        out = model(torch.ones(3, 2, 4))
        assert out.dtype == BF16
        out.sum().backward()
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))

    # Copies compute in full precision.
    model = replicated()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not isinstance(other, ReplicateModule)
        assert step(other, rank) == FP32
        assert other.out.weight is other.tokens.weight
    assert step(model, rank) == BF16
    unreplicate(model)
    assert step(model, rank) == FP32 and not model.up._forward_hooks

    # Conflicts.
    for options in ({"comm_hook": "fp16"}, {"precision": Precision(wire=BF16)}):
        model = Net()
        with pytest.raises(ValueError, match=r"conflicts with (comm_hook=|Precision\(wire=)"):
            torchddp.replicate(model, mp_policy=POLICIES[0], **options)
        assert not isinstance(model, ReplicateModule)
    with pytest.raises(TypeError, match="must be a torch.distributed.fsdp.MixedPrecisionPolicy, got dtype"):
        torchddp.replicate(Net(), mp_policy=BF16)
    with torch.autocast("cpu", dtype=BF16):  # no policy needed
        assert step(torchddp.replicate(Net()), rank) == BF16
