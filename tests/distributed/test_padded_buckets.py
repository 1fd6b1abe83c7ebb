"""Gradients that begin at cache lines, as on GPUs: the same results, and zeros between them whatever hooks do."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.harness import each, on_ranks
from tests.models import assert_grads, grads_of, seeded
from tests.whole_buckets import PaddedBuckets, PaddedSharded, WholeBuckets, WholeSharded
from torchddp import _C, comm_hooks
from torchddp.ddp.model import SLOT_ALIGNMENT_BYTES
from torchddp.optim import OSS

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
        seen.append(grads_of(ddp))
    return seen


def assert_equal_steps(ours, theirs, tolerance=0.0):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_padded(ddp):
    buckets, specs = ddp.reducer.plan.buckets, ddp.session.specs
    for bucket in buckets:
        itemsize = specs[bucket.params[0]].itemsize
        assert all(offset * itemsize % SLOT_ALIGNMENT_BYTES == 0 for offset in bucket.offsets)
    assert sum(bucket.numel for bucket in buckets) > sum(spec.numel for spec in specs)


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


def trained(kind, rank, dtypes=(torch.float32,), shapes=SHAPES, hook=None, **options):
    """(wrapper, the gradients of each step)."""
    ddp = kind(seeded(lambda: Odd(dtypes, shapes)), **options)
    if isinstance(hook, dist.BuiltinCommHookType):
        ddp._register_builtin_comm_hook(hook)
    elif hook is not None:
        ddp.register_comm_hook(*hook)
    return ddp, train(ddp, rank)


@on_ranks(2)
def test_same_bits_as_end_to_end(rank):
    for transport, views in each(["c10d", "auto"], [None, True, False]):
        options = {"transport": transport, "bucket_cap_mb": 0.002, "gradient_as_bucket_view": views}
        padded, mine = trained(PaddedBuckets, rank, DTYPES, **options)
        assert_equal_steps(mine, trained(WholeBuckets, rank, DTYPES, **options)[1])
        assert_padded(padded)
    padded, mine = trained(PaddedBuckets, rank, gradient_stats=True)
    plain, theirs = trained(WholeBuckets, rank, gradient_stats=True)
    assert_equal_steps(mine, theirs)
    torch.testing.assert_close(padded.gradient_stats(), plain.gradient_stats())


@on_ranks(2)
def test_what_hooks_see_and_write_between_gradients(rank):
    looks = Looks()
    trained(PaddedBuckets, rank, hook=(None, looks))
    assert len(looks.outside) == STEPS
    assert all(outside.numel() > 0 and not outside.any() for outside in looks.outside)

    def divides(state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / bucket.buffer())  # NaN where nothing is
        return future

    padded, _ = trained(PaddedBuckets, rank, hook=(None, divides), gradient_stats=True)
    numel = sum(p.numel() for p in padded.parameters())
    assert padded.gradient_stats().tolist() == [[numel, 0.0]]


def torch_power_sgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


HOOKS = [
    (lambda: (None, default_hooks.allreduce_hook), 0.0),
    (lambda: (None, default_hooks.fp16_compress_hook), 0.0),
    (torch_power_sgd, 1e-5),
    (lambda: (None, comm_hooks.FP16()), 0.0),
    (lambda: (None, comm_hooks.PowerSGD(rank=2)), 1e-5),
    (lambda: (None, comm_hooks.without_norms_and_biases(comm_hooks.FP16())), 0.0),
    (lambda: dist.BuiltinCommHookType.ALLREDUCE, 0.0),
    (lambda: dist.BuiltinCommHookType.FP16_COMPRESS, 0.0),
]


@on_ranks(2)
def test_hooks_give_the_same_as_end_to_end(rank):
    shapes = [shape for shape in SHAPES if 0 not in shape]  # torch's PowerSGD takes no others
    for make, tolerance in each(HOOKS):
        padded, mine = trained(PaddedBuckets, rank, shapes=shapes, hook=make())
        assert_equal_steps(mine, trained(WholeBuckets, rank, shapes=shapes, hook=make())[1], tolerance)
        assert_padded(padded)


REDUCER = _C.Reducer


def measured(*args, **kwargs):
    return REDUCER(*args, **{**kwargs, "gradient_stats": True})


def sharded(kind, rank, reduce_fp16):
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


@on_ranks(2)
def test_sharded_gradients(rank):
    """Memory that is lent to a bucket of another rank's parameters has held other gradients."""
    for reduce_fp16 in each([False, True]):
        padded, mine, stats = sharded(PaddedSharded, rank, reduce_fp16)
        _, theirs, plain_stats = sharded(WholeSharded, rank, reduce_fp16)
        assert_padded(padded)
        assert_grads(mine, theirs, rtol=0)
        torch.testing.assert_close(stats, plain_stats)
