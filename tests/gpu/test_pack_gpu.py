"""The pack kernels as the reducer calls them: pack gradients into a bucket, scale, unpack, and compute statistics.

One rank, whose average is its own gradient over the divisor, compared with torch's operators. The device's arithmetic
replaces NaN payloads, so NaNs are compared as NaNs and all else bitwise.
"""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from torchddp import Checks, DistributedDataParallel

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMELS = [1, 7, 100, 4096, 5000, 70_001]
# Guard elements at both ends that no kernel may write.
GUARD = 16


def name(value: object) -> str:
    return str(value).removeprefix("torch.")


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return ctx.gradient, None


class Given(nn.Module):
    """Parameters whose gradients are forward's arguments."""

    def __init__(self, numels: list[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for k, numel in enumerate(numels):
            self.register_parameter(f"weight{k}", nn.Parameter(torch.zeros(numel, dtype=dtype, device=device)))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        given = [_Give.apply(weight, grad) for weight, grad in zip(self.parameters(), gradients, strict=True)]
        return torch.stack(given).sum()


def wrapped(numels: list[int], dtype: torch.dtype, device: torch.device, divisor: int = 1, **options: Any) -> Any:
    """Wrap parameters in one bucket. Over c10d torch allocates memory, so sanitizers see out-of-bounds writes."""
    ddp = DistributedDataParallel(Given(numels, dtype, device), transport="c10d", bucket_cap_mb_list=[1000], **options)
    assert len(ddp.reducer.plan.buckets) == 1
    ddp.reducer.set_divisor(lambda: divisor)
    return ddp


def backward(ddp: Any, gradients: list[Tensor]) -> list[Tensor]:
    ddp(gradients).real.backward()
    if gradients[0].is_cuda:
        torch.cuda.synchronize()
    return [weight.grad for weight in ddp.parameters()]


def random_values(numel: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Values of many magnitudes, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-30, 12, (numel,), generator=generator).double())
    for special, every in ((math.inf, 29), (-math.inf, 31), (math.nan, 37), (-0.0, 23)):
        values[every - 1 :: every] = special
    return values.to(dtype).to(device)


def scaled(source: Tensor, divisor: int) -> Tensor:
    """The kernels' specification in torch's operators: a product in float (or double), rounded once."""
    if divisor == 1:
        return source.clone()
    product = source.to(torch.float64 if source.dtype == torch.float64 else torch.float32)
    # A tensor, because torch would multiply by a Python number in double.
    product = product * torch.tensor(1.0 / divisor, dtype=product.dtype, device=source.device)
    return product.to(source.dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = BITS[actual.element_size()]
    same = actual.view(bits) == expected.view(bits)
    same |= actual.isnan() & expected.isnan()
    assert same.all(), f"{(~same).sum()} elements differ, the first at {(~same).nonzero()[0].item()}"


def guarded(numel: int, dtype: torch.dtype, shift: int, device: torch.device) -> Tensor:
    """Zeros `shift` elements after a 16-byte boundary, between guard elements filled with ones."""
    memory = torch.ones(2 * GUARD + shift + numel, dtype=dtype, device=device)
    return memory[GUARD + shift : GUARD + shift + numel].zero_()


def guards(tensor: Tensor) -> Tensor:
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    begin = tensor.storage_offset()
    return torch.cat([memory[:begin], memory[begin + tensor.numel() :]])


def check_apart(
    device: torch.device, numels: list[int], dtype: torch.dtype, divisor: int, shifts: tuple[int, ...] = (0,)
) -> None:
    """Gradients in their own memory, at any alignment, are packed, and averages are unpacked to the same place."""
    ddp = wrapped(numels, dtype, device, divisor, gradient_as_bucket_view=False)
    for k, weight in enumerate(ddp.parameters()):
        weight.grad = guarded(weight.numel(), dtype, shifts[k % len(shifts)], device)
    before = [weight.grad.data_ptr() for weight in ddp.parameters()]
    values = [random_values(numel, dtype, device, k) for k, numel in enumerate(numels)]
    for grad, address, value in zip(backward(ddp, values), before, values, strict=True):
        assert grad.data_ptr() == address
        assert_same(grad, scaled(torch.zeros_like(value) + value, divisor))
        assert (guards(grad) == 1).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("divisor", [1, 4, 3])
def test_gradients_outside_the_bucket_are_packed_and_unpacked(alone, dtype, divisor):
    check_apart(alone, NUMELS, dtype, divisor)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_any_alignment_of_a_gradient(alone, dtype):
    for shift in range(16 // dtype.itemsize):
        check_apart(alone, [5003, 33], dtype, 2, (shift, 0))


@pytest.mark.parametrize("count", [139, 144, 145, 416, 417, 1168, 1169, 1313, 2500])
def test_any_number_of_gradients(gpu, count):
    sizes = random.Random(count)
    numels = [sizes.choice([1, 5, 64, 300]) for _ in range(count)]
    numels[count // 2] = 300_000
    check_apart(gpu, numels, torch.float32, 8, (0, 1, 2))


def test_a_large_bucket_fills_a_bounded_grid(gpu):
    check_apart(gpu, [30_000_000, 11, 5_000_001], torch.float32, 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("divisor", [1, 3])
def test_gradients_become_memory_of_the_bucket_and_are_scaled_there(alone, dtype, divisor):
    ddp = wrapped(NUMELS, dtype, alone, divisor, gradient_as_bucket_view=True)
    values = [random_values(numel, dtype, alone, k) for k, numel in enumerate(NUMELS)]
    for grad, value in zip(backward(ddp, values), values, strict=True):
        assert_same(grad, scaled(value, divisor))
    ddp.zero_grad(set_to_none=False)
    for grad, value in zip(backward(ddp, values), values, strict=True):
        assert_same(grad, scaled(torch.zeros_like(value) + value, divisor))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=name)
@pytest.mark.parametrize("views", [True, False])
def test_complex_gradients(alone, dtype, views):
    ddp = wrapped([3001, 5], dtype, alone, 2, gradient_as_bucket_view=views)
    values = [torch.randn(numel, dtype=dtype, device=alone) for numel in (3001, 5)]
    for grad, value in zip(backward(ddp, values), values, strict=True):
        assert torch.equal(grad, value * 0.5)


# With factors such as a third this exercises denormals and ties; other tests cover the CPU's kernels.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_every_16_bit_number(alone, dtype):
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    for divisor in (1, 2, 3, 7, 10_000):
        ddp = wrapped([every.numel()], dtype, alone, divisor, gradient_as_bucket_view=True)
        (grad,) = backward(ddp, [every.to(alone)])
        assert_same(grad.cpu(), scaled(every, divisor))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=name)
def test_16_bit_gradients_of_wider_parameters(gpu, half, dtype):
    """mixed_precision: the only conversion when packing."""
    options = {"mixed_precision": _MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)}
    ddp = wrapped([65536, 7], dtype, gpu, gradient_as_bucket_view=True, **options)
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(half).to(gpu)
    values = [every, every[:7].clone()]
    for grad, value in zip(backward(ddp, values), values, strict=True):
        assert_same(grad, value.to(dtype))


def test_plain_copies_keep_the_payload_of_a_nan(alone):
    bits = torch.tensor([0x7F800001, 0x7FABCDEF, -1, 0x7FC00000] * 5, dtype=torch.int32, device=alone)
    ddp = wrapped(
        [bits.numel()], torch.float32, alone, gradient_as_bucket_view=True, checks=Checks(gradient_stats=True)
    )
    (grad,) = backward(ddp, [bits.view(torch.float32)])
    assert torch.equal(grad.view(torch.int32), bits)
    assert ddp.gradient_stats()[0, 1].item() == bits.numel()


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("divisor", [1, 3])
def test_statistics_are_of_what_is_in_the_bucket(alone, dtype, divisor):
    numels = [1, 5000, 300_001, 33]
    ddp = wrapped(numels, dtype, alone, divisor, checks=Checks(gradient_stats=True))
    grads = backward(ddp, [torch.randn(numel, device=alone).to(dtype) for numel in numels])
    (sum_squares, non_finite), *others = ddp.gradient_stats().tolist()
    flat = torch.cat(grads)
    # All terms have the same sign, so n additions err by at most n roundings.
    assert sum_squares == pytest.approx(flat.double().square().sum().item(), rel=flat.numel() * 2.0**-51)
    assert non_finite == 0 and not others


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_every_infinity_and_nan_is_counted(alone, dtype):
    ddp = wrapped([200_003], dtype, alone, 2, checks=Checks(gradient_stats=True))
    (grad,) = backward(ddp, [random_values(200_003, dtype, alone, 9)])
    sum_squares, non_finite = ddp.gradient_stats()[0].tolist()
    assert non_finite == (~grad.isfinite()).sum().item() > 0
    assert not math.isfinite(sum_squares)


def test_statistics_are_deterministic(gpu):
    values = [torch.randn(1 + 37 * k % 1000, device=gpu) for k in range(2500)]
    ddp = wrapped([value.numel() for value in values], torch.float32, gpu, 10, checks=Checks(gradient_stats=True))
    results = []
    for _ in range(5):
        ddp.zero_grad()
        backward(ddp, values)
        results.append(ddp.gradient_stats().view(torch.int64).tolist())
    assert results == results[:1] * 5


@pytest.mark.profiler
@pytest.mark.parametrize(("count", "launches"), [(1, 1), (1000, 1), (1169, 2)])
def test_a_bucket_is_one_launch(gpu, count, launches):
    values = [torch.ones(10, device=gpu) for _ in range(count)]
    ddp = wrapped([10] * count, torch.float32, gpu, 2, gradient_as_bucket_view=True)

    def step():
        ddp.zero_grad(set_to_none=True)
        backward(ddp, values)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("pack_kernel" in kernel for kernel in kernels) == launches, kernels
