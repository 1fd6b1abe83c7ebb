"""Precision(main_grads=): gradients of 16-bit parameters are accumulated in fp32 over microbatches and ranks."""

import contextlib
import copy
import functools
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fault.test_bad_input import Twice
from tests.harness import each, on_ranks, through_a_file
from tests.models import batch, loss_of, seeded
from tests.whole_buckets import WholeBuckets
from torchddp import DDP, Checks, Precision
from torchddp.composable import replicate

BF16, FP32 = torch.bfloat16, torch.float32
MICRO = 3
EACH_PLACE = pytest.mark.parametrize("place", ["main_grad", "grad"])


def layers() -> nn.Module:
    """Layers of which one has a gradient large enough for its own bucket."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 1700), nn.Tanh(), nn.Linear(1700, 7)).to(BF16)


def loss(model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
    torch.manual_seed(100 * step + 10 * micro + rank)
    return model(torch.randn(5, 30).to(BF16)).square().sum()


def sums(model: nn.Module, micro: int, run: Callable[[nn.Module, int, int], Any]) -> list[Tensor]:
    """Sum autograd's gradients in this process, over microbatches and then two ranks, in fp32."""

    def zeros() -> list[Tensor]:
        return [torch.zeros(p.shape) for p in parameters]

    parameters = list(model.parameters())
    total = zeros()
    for rank in range(2):
        mine = zeros()
        for i in range(micro):
            model.zero_grad()
            run(model, rank, i)
            for t, p in zip(mine, parameters, strict=True):
                t += 0 if p.grad is None else p.grad
        for t, m in zip(total, mine, strict=True):
            t += m / 2
    return total


@functools.cache
def expected(step: int, micro: int = MICRO) -> list[Tensor]:
    """The expected gradients of the model that `layers` makes."""
    return sums(layers(), micro, lambda model, r, i: loss(model, r, step, i).backward())


def run_step(ddp: Any, rank: int, step: int) -> None:
    for i in range(MICRO):
        with ddp.no_sync() if i < MICRO - 1 else contextlib.nullcontext():
            loss(ddp, rank, step, i).backward()


def grad_of(p: Any) -> Any:
    """The fp32 gradient, in `main_grad` or `grad`."""
    return p.grad if getattr(p, "main_grad", None) is None else p.main_grad


def kept(ddp: nn.Module) -> list[Tensor]:
    found = [grad_of(p) for p in ddp.parameters()]
    assert all(g.dtype == torch.float32 for g in found), [g.dtype for g in found]
    return found


def wrapped(module: nn.Module, cls: type = DDP, *, main_grads_as: Any = "main_grad", **options: Any) -> Any:
    return cls(module, precision=Precision(main_grads=torch.float32, main_grads_as=main_grads_as), **options)


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


class _Weight(nn.Module):
    """A weight whose gradient is forward's argument."""

    def __init__(self, dtype=BF16):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


@pytest.mark.parametrize("cls", [DDP, WholeBuckets])
@on_ranks(2)
def test_main_grad_is_the_bucket(rank, cls):
    """autograd's own gradient is freed after the hook."""
    ranges = []

    def note(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        assert buffer.dtype == FP32
        ranges.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes))
        return dist.all_reduce(buffer.div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

    ddp = wrapped(layers(), cls, comm_hook=note, bucket_cap_mb=0.01)
    born = []
    for p in ddp.parameters():
        p.register_post_accumulate_grad_hook(lambda p: born.append(weakref.ref(p.grad)))
    shown = [p.main_grad for p in ddp.parameters()]
    for step in range(3):
        ranges.clear()
        run_step(ddp, rank, step)
        for p, main in zip(ddp.parameters(), shown, strict=True):
            assert p.main_grad is main and p.grad is None
            assert sum(begin <= main.data_ptr() < end for begin, end in ranges) == 1
        assert_equal(shown, expected(step))
        ddp.zero_grad()
    assert len(ranges) > 1
    assert len(born) == 3 * MICRO * len(shown) and not any(ref() for ref in born)


@on_ranks(2)
def test_what_clears_fp32_gradients(rank):
    # main_grad.
    ddp = wrapped(_Weight())
    weight, main = ddp.module.weight, ddp.module.weight.main_grad
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)

    def after(value):
        ddp(value).backward()
        assert weight.main_grad is main and weight.grad is None and main.unique().numel() == 1
        return main[0].item()

    assert [after(1.0), after(2.0)] == [1.0, 3.0]
    optimizer.step()
    optimizer.zero_grad()
    ddp.module.zero_grad()
    assert after(1.0) == 4.0  # these don't clear main_grad
    ddp.zero_grad()
    assert not main.any()
    assert after(5.0) == 5.0
    ddp.zero_grad(set_to_none=False)
    assert after(6.0) == 6.0
    weight.main_grad = None
    assert after(7.0) == 7.0
    del weight.main_grad
    assert after(8.0) == 8.0
    main.zero_()
    assert after(9.0) == 9.0
    weight.main_grad = torch.full((4,), 0.5)  # like an assignment to .grad
    assert after(1.0) == 1.5
    main.mul_(2)
    assert after(1.0) == 4.0
    weight.main_grad = torch.full((4,), 0.5)
    ddp.zero_grad()  # what was assigned, too
    assert after(1.0) == 1.0
    weight.main_grad = None
    with ddp.no_sync():
        ddp(float(rank)).backward()
    assert main[0].item() == rank
    assert after(float(rank)) == 1.0
    for wrong in (3.0, torch.zeros(3)):
        weight.main_grad = wrong
        with pytest.raises(ValueError, match=r"'weight': main_grad must be None, or a tensor of shape \[4\]; got"):
            ddp(1.0)

    # .grad as usual, also with a scaler.
    ddp = wrapped(_Weight(torch.float16), main_grads_as="grad")
    weight = ddp.module.weight
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert weight.grad is None
    for _ in range(2):
        scaler.scale(ddp(2.0 + rank)).backward()
        scaler.unscale_(optimizer)
        assert weight.grad.dtype == FP32 and weight.grad.tolist() == [2.5] * 4
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert weight.grad is None


@EACH_PLACE
@on_ranks(2)
def test_a_parameter_used_by_two_checkpoints_in_a_static_graph(rank, place):
    """Its hook fires twice per step, and the first gradient is incomplete."""

    def backward(model, rank, step):
        loss_of(model(batch(rank, step, 3, 4, dtype=BF16)).float()).backward()

    ddp = wrapped(seeded(Twice).to(BF16), main_grads_as=place, static_graph=True)
    for step in range(3):
        backward(ddp, rank, step)
        want = [torch.zeros_like(p, dtype=FP32) for p in ddp.parameters()]
        for r in range(2):
            # autograd passes gradients one by one, so that nothing adds them in bf16.
            model, came = seeded(Twice).to(BF16), []
            for p, total in zip(model.parameters(), want, strict=True):
                p.register_hook(lambda g, total=total, came=came: came.append((total, g.float())))
            backward(model, r, step)
            for total, g in came:
                total.add_(g / 2)
        torch.testing.assert_close(kept(ddp), want, rtol=1e-6, atol=1e-5)
        ddp.zero_grad()


@EACH_PLACE
@on_ranks(2)
def test_nonfinite_values_are_found(rank, place):
    ddp = wrapped(_Weight(), main_grads_as=place, checks=Checks(gradient_stats=True, nonfinite=True))
    ddp(float("inf") if rank == 1 else 1.0).backward()
    assert ddp.gradient_stats()[0, 1].item() == 4
    ddp(0.0)  # a forward publishes what was found
    found = [(f.rank, f.parameter) for f in ddp.nonfinite()]
    assert found == [(1, "weight")] or (rank == 0 and not found)


@EACH_PLACE
@on_ranks(2)
def test_layouts_that_are_not_row_major_and_copies(rank, place):
    # Layouts that are not row-major.
    def backward(model, rank, micro):
        loss_of(model(batch(rank, micro, 2, 3, 8, 8, dtype=BF16)).float()).backward()

    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3).to(BF16, memory_format=torch.channels_last)
    want, _ = sums(copy.deepcopy(conv), 2, backward)
    ddp = wrapped(conv, main_grads_as=place)
    with ddp.no_sync():
        backward(ddp, rank, 0)
    backward(ddp, rank, 1)
    got = getattr(ddp.module.weight, place)
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)

    # Copies.
    ddp = wrapped(_Weight(), main_grads_as=place)
    ddp(2.0).backward()
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), through_a_file(ddp, weights_only=False)):
        assert grad_of(other.module.weight) is not grad_of(ddp.module.weight)
        other.zero_grad()
        other(float(rank)).backward()
        grad = getattr(other.module.weight, place)
        assert grad.dtype == FP32 and grad.tolist() == [0.5] * 4
        assert place == "grad" or other.module.weight.grad is None
    assert grad_of(ddp.module.weight).tolist() == [2.0] * 4


@EACH_PLACE
@on_ranks(2)
def test_accumulated_gradients_stay_over_another_group(rank, place):
    ddp = wrapped(layers(), main_grads_as=place, transport="shm")
    shown = [getattr(p, "main_grad", None) for p in ddp.parameters()]
    with ddp.no_sync():
        loss(ddp, rank, 0, 0).backward()
    ddp.update_process_group(dist.new_group())
    loss(ddp, rank, 0, 1).backward()
    assert_equal(kept(ddp), expected(0, micro=2))
    assert all(getattr(p, "main_grad", None) is s for p, s in zip(ddp.parameters(), shown, strict=True))


@on_ranks(2)
def test_main_grad_lives_as_long_as_grad(rank):
    # With create_graph only values are kept.
    ddp = wrapped(_Weight())
    ddp.module.weight.main_grad = torch.ones(4)
    with pytest.warns(UserWarning, match="they can't be differentiated further"):
        (ddp(1.0 + rank) ** 2).backward(create_graph=True)
    grad = ddp.module.weight.main_grad
    assert not grad.requires_grad
    assert grad.tolist() == [1 + (2 * 4 * 1 + 2 * 8 * 2) / 2] * 4

    # Across a new wrapper.
    module = _Weight()
    first = wrapped(module)
    first(2.0).backward()
    del first
    assert module.weight.main_grad.tolist() == [2.0] * 4  # outlives its wrapper
    again = wrapped(module)
    again(1.0).backward()
    assert module.weight.main_grad.tolist() == [3.0] * 4
    wide = _Weight()
    wide.weight.grad = torch.full((4,), 2.0, dtype=BF16)
    wrapped(wide, main_grads_as="grad")(1.0).backward()
    assert wide.weight.grad.dtype == FP32 and wide.weight.grad.tolist() == [3.0] * 4


@EACH_PLACE
@on_ranks(2)
def test_a_refused_refresh_changes_nothing(rank, place):
    for transport in each(["shm", "c10d"]):
        ddp = wrapped(layers(), transport=transport, main_grads_as=place)
        run_step(ddp, rank, 0)
        ddp.module.extra = nn.Embedding(4, 4, sparse=True, dtype=BF16)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"rank {rank}.*extra\.weight.*sparse"):
                ddp.refresh_trainable()
        assert_equal(kept(ddp.module[:-1]), expected(0))
        del ddp.module.extra
        ddp.zero_grad()
        run_step(ddp, rank, 1)
        assert_equal(kept(ddp), expected(1))
        # Closed, the model keeps its gradients, and clearing them is safe.
        ddp.session.close()
        assert_equal(kept(ddp), expected(1))
        ddp.zero_grad()
        assert all(p.main_grad.count_nonzero() == 0 for p in ddp.parameters() if place == "main_grad")
        with pytest.raises(RuntimeError, match="no longer reduces gradients"):
            run_step(ddp, rank, 2)


@on_ranks(1)
def test_unsupported_options_and_models(rank):
    wide, main, late = (
        {"precision": Precision(reduce=FP32)},
        {"precision": Precision(main_grads=FP32)},
        {"delay_all_reduce_named_params": [("a", None)]},
    )
    once_wide = _Weight()
    wrapped(once_wide, main_grads_as="grad")
    narrow, embedding = _Weight(), partial(nn.Embedding, 4, 4, sparse=True)
    only = "must be torch.float32 or None, got"
    for model, options, text in (
        (narrow, {"precision": Precision(reduce=torch.float64)}, rf"reduce=\) {only} torch.float64.*wire="),
        (narrow, {"precision": Precision(reduce=BF16)}, rf"reduce=\) {only} torch.bfloat16"),
        (narrow, {"precision": Precision(main_grads=BF16)}, rf"main_grads=\) {only} torch.bfloat16"),
        (narrow, {"precision": Precision(main_grads=True)}, rf"main_grads=\) {only} True"),
        (
            narrow,
            {"precision": Precision(main_grads=FP32, main_grads_as="x")},
            r"main_grads_as=\) must be one of 'main_grad', 'grad', got 'x'",
        ),
        (narrow, {**wide, **late}, r"conflicts with delay_all_reduce_named"),
        (embedding(dtype=BF16), main, r"main_grads=torch.float32\) needs dense gradients.*'weight'"),
        (embedding(dtype=BF16), wide, r"reduce=torch.float32\) needs dense gradients.*'weight'"),
        (wrapped(_Weight()), {}, r"already wrapped with Precision.main_grads"),
        (DDP(_Weight()), main, r"main_grads=torch.float32\) conflicts with wrapping a model twice"),
        *[(once_wide, options, r"'weight' is torch.bfloat16, but its grad_dtype is") for options in ({}, main, wide)],
    ):
        with pytest.raises(ValueError, match=text):
            DDP(model, **options)
    DDP(embedding(dtype=FP32), **wide)(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="no main gradients: use torchddp.Dist"):
        replicate(_Weight(), precision=Precision(main_grads=FP32))
