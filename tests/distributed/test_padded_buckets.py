"""Gradients that begin at cache lines, as on GPUs: the same results, and zeros between them whatever hooks do."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.harness import on_ranks
from tests.models import grads_of, seeded
from tests.whole_buckets import PaddedBuckets, PaddedSharded, WholeBuckets, WholeSharded
from torchddp import _C, comm_hooks
from torchddp.ddp.model import SLOT_ALIGNMENT_BYTES
from torchddp.optim import OSS

pytestmark = pytest.mark.beyond_torch("pads the buckets of GPUs")

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
SHAPES = [(7,), (3, 5), (1,), (33, 2), (0,), (4, 3, 3, 3), (257,)]
STEPS = 3


class Odd(nn.Module):
    """Parameters of odd shapes, one channels-last; the gradient of each depends on the rank and the step."""

    def __init__(self, dtypes, shapes=SHAPES):
        super().__init__()
        for k, (shape, dtype) in enumerate((shape, dtype) for shape in shapes for dtype in dtypes):
            value = torch.randn(shape, dtype=dtype)
            value = value.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else value
            self.register_parameter(f"weight{k}", nn.Parameter(value))

    def forward(self, factor):
        return torch.stack([(w * w * factor).sum().real.double() for w in self.parameters()]).sum()


def train(ddp, rank):
    """The gradients of each step, some accumulated; the buckets are rebuilt after the first."""
    seen = []
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=step != 1)
        ddp(torch.tensor(0.37 + rank + step, dtype=torch.float32)).backward()
        seen.append({name: grad.clone() for name, grad in grads_of(ddp).items()})
    return seen


def assert_equal_steps(ours, theirs, tolerance=0.0):
    for step, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == others.keys()
        for name, grad in mine.items():
            torch.testing.assert_close(grad, others[name], rtol=tolerance, atol=tolerance, msg=f"{step} {name}")


def assert_padded(ddp):
    padded = 0
    for bucket in ddp.reducer.plan.buckets:
        sizes = [ddp.session.specs[param].numel for param in bucket.params]
        itemsize = ddp.session.specs[bucket.params[0]].itemsize
        assert all(offset * itemsize % SLOT_ALIGNMENT_BYTES == 0 for offset in bucket.offsets)
        padded += bucket.numel - sum(sizes)
    assert padded > 0


class Looks:
    """A hook that averages, and remembers what lay between gradients."""

    def __init__(self):
        self.outside = []

    def __call__(self, state, bucket):
        flat = bucket.buffer()
        outside = torch.ones(flat.numel(), dtype=torch.bool)
        for grad in bucket.gradients():
            begin = grad.storage_offset() - flat.storage_offset()
            outside[begin : begin + grad.numel()] = False
        self.outside.append(flat[outside].clone())
        return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": False}], ids=str
)
@pytest.mark.parametrize("transport", ["c10d", "auto"])
@on_ranks(2)
def test_same_bits_as_end_to_end(rank, options, transport):
    options_ = {"transport": transport, "bucket_cap_mb": 0.002, **options}
    padded = PaddedBuckets(seeded(lambda: Odd(DTYPES)), **options_)
    plain = WholeBuckets(seeded(lambda: Odd(DTYPES)), **options_)
    assert_equal_steps(train(padded, rank), train(plain, rank))
    assert_padded(padded)


@on_ranks(2)
def test_statistics_are_those_of_the_gradients(rank):
    padded, plain = (
        kind(seeded(lambda: Odd([torch.float32])), gradient_stats=True) for kind in (PaddedBuckets, WholeBuckets)
    )
    assert_equal_steps(train(padded, rank), train(plain, rank))
    torch.testing.assert_close(padded.gradient_stats(), plain.gradient_stats())


@on_ranks(2)
def test_hooks_see_zeros_between_gradients(rank):
    looks = Looks()
    padded = PaddedBuckets(seeded(lambda: Odd([torch.float32])))
    padded.register_comm_hook(None, looks)
    train(padded, rank)
    assert len(looks.outside) == STEPS
    assert all(outside.numel() > 0 and not outside.any() for outside in looks.outside)


@on_ranks(1)
def test_what_a_hook_writes_between_gradients_is_gone(rank):
    def divides(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / bucket.buffer())  # NaN where nothing is
        return future

    padded = PaddedBuckets(seeded(lambda: Odd([torch.float32])), gradient_stats=True)
    padded.register_comm_hook(None, divides)
    train(padded, rank)
    numel = sum(p.numel() for p in padded.parameters())
    assert padded.gradient_stats().tolist() == [[numel, 0.0]]


def torch_power_sgd():
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), (
        powerSGD_hook.powerSGD_hook
    )


HOOKS = {
    "allreduce": (lambda: (None, default_hooks.allreduce_hook), 0.0),
    "fp16": (lambda: (None, default_hooks.fp16_compress_hook), 0.0),
    "powersgd": (torch_power_sgd, 1e-5),
    "ours_fp16": (lambda: (None, comm_hooks.FP16()), 0.0),
    "ours_powersgd": (lambda: (None, comm_hooks.PowerSGD(rank=2)), 1e-5),
    "ours_per_parameter": (lambda: (None, comm_hooks.without_norms_and_biases(comm_hooks.FP16())), 0.0),
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_hooks_give_the_same_as_end_to_end(rank, name):
    make, tolerance = HOOKS[name]

    shapes = [shape for shape in SHAPES if 0 not in shape]  # torch's PowerSGD takes no others

    def hooked(kind):
        ddp, hook = kind(seeded(lambda: Odd([torch.float32], shapes))), make()
        ddp.register_comm_hook(*hook)
        return ddp

    padded, plain = hooked(PaddedBuckets), hooked(WholeBuckets)
    assert_equal_steps(train(padded, rank), train(plain, rank), tolerance)
    assert_padded(padded)


@pytest.mark.parametrize("builtin", [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS])
@on_ranks(2)
def test_torchs_compiled_hooks(rank, builtin):
    both = [kind(seeded(lambda: Odd([torch.float32]))) for kind in (PaddedBuckets, WholeBuckets)]
    for ddp in both:
        ddp._register_builtin_comm_hook(builtin)
    assert_equal_steps(*(train(ddp, rank) for ddp in both))


@pytest.mark.parametrize("reduce_fp16", [False, True])
@on_ranks(2)
def test_sharded_gradients(rank, reduce_fp16):
    """Memory that is lent to a bucket of another rank's parameters has held other gradients."""
    reducer = _C.Reducer

    def measured(*args, **kwargs):
        return reducer(*args, **{**kwargs, "gradient_stats": True})

    def trained(kind, rank):
        model = seeded(lambda: Odd([torch.float32, torch.float64]))
        optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
        with mock.patch.object(_C, "Reducer", measured):
            ddp = kind(model, optimizer, reduce_fp16=reduce_fp16)
        for step in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.tensor(0.37 + rank + step)).backward()
        owners = [ddp.session.specs[bucket.params[0]].owner for bucket in ddp.reducer.plan.buckets]
        assert set(owners) == {0, 1}
        own = [index for index, owner in enumerate(owners) if owner == rank]
        return ddp, grads_of(ddp), ddp.reducer.gradient_stats()[own]

    padded, mine, stats = trained(PaddedSharded, rank)
    _, theirs, plain_stats = trained(WholeSharded, rank)
    assert_padded(padded)
    assert mine.keys() == theirs.keys()
    for name, grad in mine.items():
        assert (grad is None) == (theirs[name] is None)
        assert grad is None or torch.equal(grad, theirs[name])
    torch.testing.assert_close(stats, plain_stats)
