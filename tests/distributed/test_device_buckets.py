"""As on GPUs, on the CPU: complete buckets are packed, large gradients stay where they were made, others are padded."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from tests.gpu.test_pack_gpu import FLOATS, Given, assert_same, random_values, scaled
from tests.harness import each, future_of, on_ranks, stay
from tests.models import Mlp, assert_grads, assert_steps, batch, gradients_made, grads_of, loss_of, seeded, step_on
from tests.whole_buckets import LargeInPlace, PaddedBuckets, PaddedSharded, WholeBuckets, WholeSharded
from torchddp import _C, Checks, TransportError, comm_hooks
from torchddp.ddp.model import SLOT_ALIGNMENT_BYTES
from torchddp.optim import OSS

LIMIT = LargeInPlace.in_place_bytes

pytestmark = pytest.mark.beyond_torch("packs whole buckets in its own way")


def _large(module):
    return {name for name, p in module.named_parameters() if p.nbytes >= LIMIT}


def _in_place(**options):
    return LargeInPlace(seeded(Mlp), transport="c10d", **options)


@pytest.mark.parametrize("views", [None, False])
@on_ranks(2)
def test_large_gradients_stay_where_autograd_allocated_them(rank, views):
    ddp = _in_place(gradient_as_bucket_view=views)
    made = gradients_made(ddp.module)
    for step in range(4):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        before = {name: p.grad.data_ptr() for name, p in ddp.module.named_parameters() if p.grad is not None}
        with ddp.no_sync():
            step_on(ddp, rank, 10 + step)
        step_on(ddp, rank, step)
        for name, p in ddp.module.named_parameters():
            if name in _large(ddp.module):
                assert p.grad.data_ptr() == made[name]
                assert before.get(name, made[name]) == made[name]
    small = [p.nbytes for p in ddp.parameters() if p.nbytes < LIMIT]
    assert 0 < sum(small) <= ddp.reducer.bucket_memory_bytes < sum(small) + len(small) * SLOT_ALIGNMENT_BYTES
    assert len(_large(ddp.module)) > 2


class Parameters(nn.Module):
    """Two parameters, `first` and `second`, of which one passes a large gradient to the other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))


class Twice(Parameters):
    """Both get the same gradient tensor, which a third part of the graph still reads."""

    def forward(self, x):
        return (self.first + self.second)[None] * x


class Late(Parameters):
    """The gradient of `second` is passed on to the branch of `first`, whose gradient completes the bucket."""

    def forward(self, x):
        branch = torch.tanh(self.first * x)
        return self.second[None] + branch


def _run_parameters(model, rank, step):
    loss_of(model(batch(rank, step, 1, 8, 8))).backward()


@on_ranks(2)
def test_gradients_that_something_else_uses(rank):
    # Not copied.
    model = seeded(Twice)
    ddp = LargeInPlace(model, transport="c10d")
    kept = []
    model.first.register_hook(lambda grad: kept.append((grad, grad.clone())))
    for step in range(2):
        assert_steps(ddp, rank, [step], _run_parameters)
        grad, copy = kept[-1]
        assert torch.equal(grad, copy)

    # Copied if in use on arrival: another stream may still read it when the bucket is complete.
    model = seeded(Late)
    made = gradients_made(model)
    ddp = LargeInPlace(model, transport="c10d")
    for step in range(3):
        assert_steps(ddp, rank, [step], _run_parameters)
        assert model.second.grad.data_ptr() != made["second"]
        assert model.first.grad.data_ptr() == made["first"]


@on_ranks(2)
def test_what_is_not_reduced_in_place(rank):
    # If one rank does not, none does.
    for name, value in each([("gradient_as_bucket_view", rank == 0), ("gradient_as_bucket_view", rank == 1)]):
        ddp = _in_place(**{name: value})
        assert_steps(ddp, rank, range(3))
        assert ddp.reducer.bucket_memory_bytes >= sum(p.nbytes for p in ddp.parameters())

    # Gradients of another layout are copied.
    ddp, packed = _in_place(), WholeBuckets(seeded(Mlp), transport="c10d")
    for model in (ddp, packed):
        for p in model.parameters():
            if p.ndim == 2:
                p.grad = torch.zeros(p.shape[::-1], dtype=p.dtype).t()  # autograd adds to it in place
        step_on(model, rank)
    assert_grads(grads_of(ddp), grads_of(packed), 0)
    assert not ddp.module.first.weight.grad.is_contiguous()


@on_ranks(2)
def test_no_gradient_of_a_failed_step_stays_in_memory_that_peers_may_write(rank):
    ddp = _in_place(timeout=timedelta(seconds=5))
    for step in range(2):
        step_on(ddp, rank, step)
    if rank == 1:
        return stay(rank)
    ddp.zero_grad()
    with pytest.raises(TransportError):
        step_on(ddp, rank, 2)
    before = {name: p.grad.data_ptr() for name, p in ddp.module.named_parameters()}
    ddp(batch(rank, 3))
    for name in _large(ddp.module):
        assert ddp.module.get_parameter(name).grad.data_ptr() != before[name]
    stay(rank)


SHAPES = [(7,), (3, 5), (1,), (33, 2), (0,), (4, 3, 3, 3), (257,)]
STEPS = 3


class Odd(nn.Module):
    """Parameters of odd shapes, one channels-last, whose gradients depend on rank and step."""

    def __init__(self, dtypes, shapes=SHAPES):
        super().__init__()
        for k, (shape, dtype) in enumerate((shape, dtype) for shape in shapes for dtype in dtypes):
            value = torch.randn(shape, dtype=dtype)
            value = value.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else value
            self.register_parameter(f"weight{k}", nn.Parameter(value))

    def forward(self, factor):
        return torch.stack([(w * w * factor).sum().real.double() for w in self.parameters()]).sum()


def assert_padded(ddp):
    buckets, specs = ddp.reducer.plan.buckets, ddp.session.specs
    for bucket in buckets:
        itemsize = specs[bucket.params[0]].itemsize
        assert all(offset * itemsize % SLOT_ALIGNMENT_BYTES == 0 for offset in bucket.offsets)
    assert sum(bucket.numel for bucket in buckets) > sum(spec.numel for spec in specs)


class ChecksGaps:
    """A hook that averages, and records the values between gradients."""

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


def trained(kind, rank, shapes=SHAPES, hook=None, **options):
    """(wrapper, the gradients of each step); buckets are rebuilt after the first."""
    ddp, seen = kind(seeded(lambda: Odd([torch.float32], shapes)), **options), []
    if hook is not None:
        ddp.register_comm_hook(*hook)
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=step != 1)
        ddp(torch.tensor(0.37 + rank + step)).backward()
        seen.append(grads_of(ddp))
    return ddp, seen


@on_ranks(2)
def test_hooks(rank):
    # What hooks read and write between gradients.
    checks = ChecksGaps()
    trained(PaddedBuckets, rank, hook=(None, checks))
    assert len(checks.outside) == STEPS
    assert all(outside.numel() > 0 and not outside.any() for outside in checks.outside)

    def divides(state, bucket):
        return future_of(bucket.buffer() / bucket.buffer())  # NaN in the gaps

    padded, _ = trained(PaddedBuckets, rank, hook=(None, divides), checks=Checks(gradient_stats=True))
    assert padded.gradient_stats().tolist() == [[sum(p.numel() for p in padded.parameters()), 0.0]]

    # Results equal those of dense buckets.
    shapes = [shape for shape in SHAPES if 0 not in shape]  # torch's PowerSGD needs nonempty shapes
    for make, tolerance in each(HOOKS):
        padded, mine = trained(PaddedBuckets, rank, shapes=shapes, hook=make())
        _, theirs = trained(WholeBuckets, rank, shapes=shapes, hook=make())
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        assert_padded(padded)


def torch_power_sgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


# tests/fuzz runs other hooks with gaps.
HOOKS = [
    (torch_power_sgd, 1e-5),
    (lambda: (None, comm_hooks.PowerSGD(rank=2)), 1e-5),
    (lambda: (None, comm_hooks.without_norms_and_biases(comm_hooks.FP16())), 0.0),
]


CONFIG = _C.ReducerConfig


def measured(*args, **kwargs):
    return CONFIG(*args, **{**kwargs, "gradient_stats": True})


def sharded(kind, rank, reduce_fp16):
    model = seeded(lambda: Odd([torch.float32, torch.float64]))
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    with mock.patch.object(_C, "ReducerConfig", measured):
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
    """Memory lent to a bucket of another rank's parameters has held other gradients before."""
    for reduce_fp16 in each([False, True]):
        padded, mine, stats = sharded(PaddedSharded, rank, reduce_fp16)
        _, theirs, plain_stats = sharded(WholeSharded, rank, reduce_fp16)
        assert_padded(padded)
        assert_grads(mine, theirs, rtol=0)
        torch.testing.assert_close(stats, plain_stats)


@on_ranks(2)
def test_gradients_become_memory_of_the_bucket(rank):
    """There is no second copy, and none is copied back."""
    for views, nonfinite in each([None, True], [False, True]):
        options = {} if views is None else {"gradient_as_bucket_view": views}
        whole = WholeBuckets(seeded(Mlp), checks=Checks(nonfinite=nonfinite), **options)
        for step in range(3):
            whole.zero_grad()
            step_on(whole, rank, step)
        gradients = [param.grad for param in whole.parameters()]
        for bucket in whole.reducer.plan.buckets:
            begins = {
                gradients[param].data_ptr() - offset * gradients[param].itemsize
                for param, offset in zip(bucket.params, bucket.offsets, strict=True)
            }
            assert len(begins) == 1 < len(bucket.params)


CPU = torch.device("cpu")
NUMELS = [1, 5, 4096, 70_001]


def made_of(kind, dtype, gradient, divisor, views):
    ddp = kind(Given(NUMELS, dtype, CPU), bucket_cap_mb=25, gradient_as_bucket_view=views)
    ddp.reducer.set_divisor(lambda: divisor)
    if gradient != dtype:
        ddp.reducer._set_mixed_precision_param_dtype(gradient)
        for param in ddp.parameters():
            param.grad_dtype = None
    return ddp


@on_ranks(1)
def test_bits_of_all_dtypes_and_of_gradients_elsewhere_in_the_bucket(ddp_class):
    # torch's operators, used where no kernel applies, also round once.
    for dtype, gradient, views, divisor in each(FLOATS, FLOATS, (True, False), (1, 3)):
        wide = gradient if torch.promote_types(dtype, gradient) == gradient else torch.promote_types(dtype, gradient)
        values = [random_values(numel, gradient, CPU, k) for k, numel in enumerate(NUMELS)]
        hooked, whole = (made_of(kind, dtype, gradient, divisor, views) for kind in (ddp_class, WholeBuckets))
        for ddp in (hooked, whole):
            ddp([value.clone() for value in values]).backward()
        for mine, theirs, value in zip(whole.parameters(), hooked.parameters(), values, strict=True):
            assert_same(mine.grad, theirs.grad)
            assert_same(mine.grad, scaled(value.to(wide), divisor).to(dtype).to(mine.grad.dtype))

    # Gradients elsewhere in the bucket are read before they are overwritten.
    whole = WholeBuckets(Given([6, 6], torch.float32, CPU), gradient_as_bucket_view=True)
    values = [torch.arange(6.0), torch.arange(6.0) + 10]
    whole(values).backward()
    first, second = whole.parameters()
    first.grad, second.grad = second.grad, first.grad
    with whole.no_sync():
        whole([torch.zeros(6), torch.zeros(6)]).backward()
    whole([torch.ones(6), torch.ones(6)]).backward()
    assert_same(first.grad, values[1] + 1)
    assert_same(second.grad, values[0] + 1)
