"""Large gradients on a device: reduced where autograd made them. On the CPU, over the process group."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import on_ranks, stay
from tests.models import (
    Mlp,
    assert_grads,
    assert_steps,
    batch,
    expected_grads,
    grads_of,
    local_grads,
    loss_of,
    seeded,
    step_on,
)
from tests.whole_buckets import LargeApart, WholeBuckets
from torchddp import TransportError
from torchddp.ddp.model import SLOT_ALIGNMENT_BYTES
from torchddp.ddp.same_model import verify_same_model

LIMIT = LargeApart.adopt_bytes


def _large(module):
    return {name for name, p in module.named_parameters() if p.nbytes >= LIMIT}


def _made(module):
    """Where autograd makes each gradient from now on, by name."""
    made = {}
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: made.__setitem__(name, p.grad.data_ptr()))
    return made


def _apart(**options):
    return LargeApart(seeded(Mlp), transport="c10d", **options)


@pytest.mark.parametrize("views", [None, False])
@on_ranks(2)
def test_large_gradients_keep_the_memory_that_autograd_gave_them(rank, views):
    ddp = _apart(gradient_as_bucket_view=views)
    made = _made(ddp.module)
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


@on_ranks(1, 2, 3, 4)
def test_averages(rank, world_size):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        options = {"transport": "c10d", "bucket_cap_mb": 0.0005}
        ddp, packed = (
            cls(seeded(lambda dtype=dtype: Mlp(dtype=dtype)), **options) for cls in (LargeApart, WholeBuckets)
        )
        for step in range(3):
            for model in (ddp, packed):
                model.zero_grad(set_to_none=step != 2)
                loss_of(model(batch(rank, step, dtype=dtype))).backward()
            # From three ranks on gloo adds in another order where a tensor is another part of a message.
            rtol = 0 if world_size < 3 else 8 * torch.finfo(dtype).eps
            assert_grads(grads_of(ddp), grads_of(packed), rtol, f"{dtype}, step {step}")


class Parameters(nn.Module):
    """Two parameters, `first` and `second`; one large gradient goes on from one to the other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))


class Twice(Parameters):
    """Both get one and the same gradient, whose memory a third part of the graph still reads."""

    def forward(self, x):
        return (self.first + self.second)[None] * x


class Late(Parameters):
    """The gradient of `second` is handed on to the branch of `first`, whose own gradient completes the bucket."""

    def forward(self, x):
        branch = torch.tanh(self.first * x)
        return self.second[None] + branch


def _run_parameters(model, rank, step):
    loss_of(model(batch(rank, step, 1, 8, 8))).backward()


@on_ranks(2)
def test_gradients_that_something_else_uses(rank):
    # Left alone.
    model = seeded(Twice)
    ddp = LargeApart(model, transport="c10d")
    kept = []
    model.first.register_hook(lambda grad: kept.append((grad, grad.clone())))
    for step in range(2):
        assert_steps(ddp, rank, [step], _run_parameters)
        grad, copy = kept[-1]
        assert torch.equal(grad, copy)

    # Copied if it used them when they came: it may still be reading, on another stream, when the bucket is complete.
    model = seeded(Late)
    made = _made(model)
    ddp = LargeApart(model, transport="c10d")
    for step in range(3):
        assert_steps(ddp, rank, [step], _run_parameters)
        assert model.second.grad.data_ptr() != made["second"]
        assert model.first.grad.data_ptr() == made["first"]


@on_ranks(2)
def test_models_inside_each_other_explicit_views_and_ranks_that_differ(rank):
    # Of two models neither may reduce in memory that the other one reads.
    inner = _apart()
    with pytest.warns(UserWarning, match="already wrapped"):
        outer = LargeApart(inner, transport="c10d")
    for step in range(3):
        outer.zero_grad()
        want = expected_grads(inner.module, lambda model, r, step=step: step_on(model, r, step))
        step_on(outer, rank, step)
        assert_grads({name.removeprefix("module."): grad for name, grad in grads_of(outer).items()}, want)
    views = _apart(gradient_as_bucket_view=True)
    step_on(views, rank)
    for ddp in (inner, outer, views):
        assert ddp.reducer.bucket_memory_bytes >= sum(p.nbytes for p in inner.parameters())

    # Ranks that would reduce in different ways are told.
    parameters = list(Mlp().parameters())
    names = [str(i) for i in range(len(parameters))]
    with pytest.raises(ValueError, match="rank 0: in their buckets, rank 1: where they lie"):
        verify_same_model(parameters, names, dist.group.WORLD, torch.device("cpu"), "nccl", rank * 1024)


@on_ranks(2)
def test_layouts_hooks_and_statistics(rank):
    # Gradients of another layout are copied.
    ddp, packed = _apart(), WholeBuckets(seeded(Mlp), transport="c10d")
    for model in (ddp, packed):
        for p in model.parameters():
            if p.ndim == 2:
                p.grad = torch.zeros(p.shape[::-1], dtype=p.dtype).t()  # autograd adds to it as it is
        step_on(model, rank)
    assert_grads(grads_of(ddp), grads_of(packed), 0)
    assert not ddp.module.first.weight.grad.is_contiguous()

    # A hook is given all gradients in one piece.
    ddp = _apart()
    step_on(ddp, rank)
    sizes = []

    def hook(_state, bucket):
        sizes.append(bucket.buffer().numel())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 3)
        return future

    ddp.register_comm_hook(None, hook)
    ddp.zero_grad()
    want = local_grads(ddp.module, lambda model: step_on(model, rank, 1))
    step_on(ddp, rank, 1)
    assert sum(sizes) >= sum(p.numel() for p in ddp.parameters())
    assert_grads(grads_of(ddp), {name: 3 * grad for name, grad in want.items()})

    # What looks at averages sees the large ones.
    options = {"gradient_stats": True, "find_nonfinite": "raise"}
    ddp = _apart(**options)
    packed = WholeBuckets(seeded(Mlp), transport="c10d", **options)
    for model in (ddp, packed):
        step_on(model, rank)
    torch.testing.assert_close(ddp.gradient_stats(), packed.gradient_stats())
    name = "middle.weight"
    p = ddp.module.get_parameter(name)
    p.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), float("nan")) if rank == 1 else grad)
    ddp.zero_grad()
    with pytest.raises(FloatingPointError, match=name):
        step_on(ddp, rank, 1)


@on_ranks(2)
def test_after_a_failed_step_nothing_is_left_in_memory_that_a_peer_may_write_to(rank):
    ddp = _apart(timeout=timedelta(seconds=1))
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
