"""torchddp.replicate() with DTensors over another dimension of a mesh, and with mp_policy, as torch's fully_shard."""

import copy
import gc
import pickle
import re
import weakref
from collections import OrderedDict
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import torchddp
from tests.harness import each, on_ranks, reductions
from tests.models import Recurrent, assert_same_training, same_on_all_ranks, whole
from torchddp import Precision
from torchddp.composable import ReplicateModule, engine_of, unreplicate

slow = pytest.mark.slow
CLOSE = 1e-11  # a split matrix product sums in another order


class Block(nn.Module):
    """Two layers to split, one that every rank holds completely, and one that only some ranks use."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 2, dtype=torch.float64)
        self.extra = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, extra=False):
        self.calls += 1
        x = self.down(torch.tanh(self.up(x)))
        return self.head(self.extra(x) if extra else x)


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel(), "extra": ColwiseParallel(output_layouts=Replicate())}


def block(frozen=True):
    torch.manual_seed(7)
    model = Block()
    model.extra.requires_grad_(not frozen)
    return model


unfrozen = partial(block, frozen=False)


def split(make=block, plan=PLAN, dp=2, tp=2):
    """(the model with DTensors over "tp", the mesh "dp", this rank's index in it)."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    return parallelize_module(make(), mesh["tp"], plan), mesh["dp"], mesh["dp"].get_local_rank()


def data(replica, step):
    generator = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def train(model, replicas, steps=4, set_to_none=True, accumulate=False, uses_extra=()):
    """Train like `replicas` data-parallel ranks, or like one of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for microbatch in range(2 if accumulate else 1):
            if accumulate and isinstance(model, torchddp.composable.ReplicateModule):
                model.set_requires_gradient_sync(microbatch == 1)
            for replica in replicas:
                out = model(data(replica, 10 * microbatch + step), replica in uses_extra)
                (out.square().mean() / len(replicas)).backward()
        optimizer.step()


COPIES = {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.0002}
KEPT = {"set_to_none": False, "accumulate": True}


@pytest.mark.parametrize(
    "runs", [[({}, {}), (COPIES, KEPT)], pytest.param([({}, KEPT), (COPIES, {})], marks=slow)], ids=["some", "others"]
)
@on_ranks(4)
def test_as_one_process(runs):
    for options, how in each(runs):
        model, mesh, replica = split()
        with torch.no_grad():  # replicate() broadcasts the first replica's
            for p in model.parameters():
                p.mul_(1.0 if replica == 0 else 3.0)
        torchddp.replicate(model, mesh=mesh, **options)
        with reductions(4):
            train(model, [replica], **how)
        reference = block()
        train(reference, [0, 1], **how)
        assert_same_training(model, reference, CLOSE)
        weight = model.up.weight
        assert isinstance(weight.grad, DTensor) and weight.grad.placements == weight.placements == (Shard(0),)
        assert set(model.state_dict()) == set(reference.state_dict())
        assert isinstance(model.state_dict()["up.weight"], DTensor)
        torchddp.check_parameters(engine_of(model))
        if options == {}:  # views: DTensors' gradients are not copied either
            assert engine_of(model)._ddp_policy.pairs[0].leaf.grad.data_ptr() == weight.grad.to_local().data_ptr()


@pytest.mark.rest_is_thorough("True")
@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=slow)])
@on_ranks(4)
def test_parameters_that_some_replicas_do_not_use(set_to_none):
    for uses_extra in each([(0,), (1,), (0, 1), ()]):
        model, mesh, replica = split(unfrozen)
        torchddp.replicate(model, mesh=mesh, find_unused_parameters=True)
        reference = unfrozen()
        for used in (uses_extra, (0, 1), uses_extra):
            how = {"set_to_none": set_to_none, "uses_extra": used}
            train(model, [replica], **how)
            train(reference, [0, 1], **how)
        assert_same_training(model, reference, CLOSE)


@slow
@on_ranks(4)
def test_static_graph_and_reduce_and_hooks():
    model, mesh, replica = split(unfrozen)
    torchddp.replicate(model, mesh=mesh, static_graph=True)
    reference = unfrozen()
    train(model, [replica], uses_extra=(0, 1))
    train(reference, [0, 1], uses_extra=(0, 1))
    assert_same_training(model, reference, CLOSE)

    model, mesh, replica = split(lambda: block().float())
    torchddp.replicate(model, mesh=mesh, comm_hook="fp16")
    with model.no_sync():
        model(data(replica, 0).float()).sum().backward()
    own = whole(model.up.weight.grad).clone()
    engine_of(model).reduce()
    assert not torch.equal(own, whole(model.up.weight.grad))
    assert isinstance(model.up.weight.grad, DTensor)


def normed():
    torch.manual_seed(1)
    layers = {"norm": nn.LayerNorm(4), "up": nn.Linear(4, 8), "tanh": nn.Tanh(), "down": nn.Linear(8, 4)}
    return nn.Sequential(OrderedDict(layers)).double()


@on_ranks(4)
def test_partial_gradients_of_sequence_parallel(rank):
    """The norm's weights are replicated, and each rank processes only its part of the sequence."""
    up, down = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    model, mesh, replica = split(normed, {"norm": SequenceParallel(), "up": up, "down": down})
    torchddp.replicate(model, mesh=mesh)
    reference = normed()

    def inputs(replica):
        return torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(replica))

    mine = inputs(replica).chunk(2, dim=1)[rank % 2]
    model(DTensor.from_local(mine, model.up.weight.device_mesh, [Shard(1)])).square().sum().backward()
    for other in (0, 1):
        (reference(inputs(other)).square().sum() / 2).backward()
    assert_same_training(model, reference, CLOSE)


@on_ranks(2)
def test_models_that_are_dropped_and_refused(rank):
    model, mesh, replica = split(tp=1)
    torchddp.replicate(model, mesh=mesh)
    train(model, [replica], steps=2)
    leaf = engine_of(model)._ddp_policy.pairs[0].leaf
    freed = [weakref.ref(model), weakref.ref(engine_of(model)), weakref.ref(leaf)]
    del leaf
    del model
    gc.collect()
    assert [ref() for ref in freed] == [None] * 3
    # DTensors over the ranks that average.
    with pytest.raises(ValueError, match=r"'up.weight' is a DTensor over ranks \[0, 1\].*mesh\['dp'\]"):
        torchddp.replicate(split(dp=1)[0])
    with pytest.raises(ValueError, match=r"'up.weight' is a DTensor.*device_mesh=mesh\['dp'\]"):
        torchddp.DDP(split(dp=1)[0])


CHANGES = {
    "converted": (nn.Module.float, r"up\.weight \(torch\.float64 to torch\.float32\), .* were converted"),
    "loaded": (
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        r"up\.weight, .* were replaced",
    ),
}


@on_ranks(2)
def test_lost_parameters_are_named(rank):
    for change, words in each(CHANGES.values()):
        model, mesh, _ = split(tp=1)
        torchddp.replicate(model, mesh=mesh)
        change(model)
        inputs = torch.full((3, 4), rank + 1.0, dtype=model.up.weight.dtype)
        with pytest.warns(UserWarning, match=words):
            model(inputs).square().sum().backward()
        model.refresh_trainable()
        model.zero_grad()
        model(inputs).square().sum().backward()
        assert same_on_all_ranks([model.up.weight.grad.to_local()])


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


def train_tied(model, rank):
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
        torchddp.replicate(mine, mp_policy=policy)
        fully_shard(theirs, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        with reductions(3):
            dtypes = train_tied(mine, rank)
        assert dtypes == train_tied(theirs, rank) == {policy.output_dtype or policy.param_dtype or FP32}
        assert mine.seen == theirs.seen == [policy.param_dtype or FP32] * 2
        assert_same_training(mine, theirs)
        assert all(type(p) is nn.Parameter and p.dtype == FP32 for p in mine.parameters())


@on_ranks(2)
def test_forwards_that_run_again_fail_or_do_not_cast_inputs(rank):
    # Activation checkpointing runs a part again.
    for reentrant in each([False, True]):
        mine, other = (replicated(*args, param_dtype=BF16, reduce_dtype=FP32) for args in ((reentrant,), ()))
        train_tied(mine, rank)
        train_tied(other, rank)
        assert_same_training(mine, other)

    # Parameters are restored after a failed forward.
    model = replicated()
    with pytest.raises(TypeError, match="must be Tensor, not str"):
        model("no tensor", torch.ones(1))
    assert all(p.dtype == FP32 and p.requires_grad for p in model.up.parameters())
    step(model, rank)
    with torch.no_grad():
        assert model(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1))["logits"].dtype == BF16

    # A checkpoint saved after Ctrl-C has the parameters, too.
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with mock.patch.object(model, "mlp", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        step(model, rank)
    saved = model.state_dict()
    assert all(saved[name].dtype == FP32 and saved[name].equal(before[name]) for name in before)
    for use in (lambda: model.load_state_dict(before), lambda: copy.deepcopy(model), model.refresh_trainable):
        with mock.patch.object(model, "mlp", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            step(model, rank)
        use()
        assert all(p.dtype == FP32 and p.requires_grad for p in model.up.parameters())

    # Inputs are not cast if the policy says so.
    model = replicated(param_dtype=BF16, cast_forward_inputs=False)
    with pytest.raises(RuntimeError, match="dtype"):  # a matrix product of two dtypes
        step(model, rank)
    assert model.seen == [BF16, FP32]


@on_ranks(2)
def test_parameters_that_were_replaced_are_cast_and_stay(rank):
    model = replicated(param_dtype=BF16, reduce_dtype=FP32)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)
    loaded = dict(model.named_parameters(remove_duplicate=False))
    with pytest.warns(UserWarning, match="up.weight, .* were replaced by other parameters"):
        step(model, rank)
    assert model.seen == [BF16, BF16]
    model.refresh_trainable()
    model.zero_grad()
    step(model, rank)
    now = dict(model.named_parameters(remove_duplicate=False))
    assert now.keys() == loaded.keys() and all(now[name] is loaded[name] for name in now)
    assert same_on_all_ranks([model.up.weight.grad])


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
    for options, named in (
        ({"comm_hook": "fp16"}, "comm_hook="),
        ({"precision": Precision(wire=BF16)}, "Precision(wire=)"),
    ):
        model = Net()
        with pytest.raises(ValueError, match=re.escape(f"conflicts with {named}")):
            torchddp.replicate(model, mp_policy=POLICIES[0], **options)
        assert not isinstance(model, ReplicateModule)
    with pytest.raises(TypeError, match="mp_policy must be a MixedPrecisionPolicy (.*), got dtype"):
        torchddp.replicate(Net(), mp_policy=BF16)
    with torch.autocast("cpu", dtype=BF16):  # no policy needed
        assert step(torchddp.replicate(Net()), rank) == BF16
