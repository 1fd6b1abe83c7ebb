"""The pack kernels on a device, against torch's own operations there and against the CPU.

A NaN comes out of the device's arithmetic as its own NaN, so NaNs are compared as NaNs, all else bit for bit.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable

import pytest
import torch

from torchddp import _C

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not _C.with_cuda, reason="this torchddp was built without CUDA"),
]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
PAIRS = list(itertools.product(FLOATS, FLOATS))
WORDS = [torch.int8, torch.bool, torch.int16, torch.int32, torch.int64]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at both ends that no kernel may touch.
GUARD = 16
# As tests/gpu/run.sh does under compute-sanitizer, beside which there is no profiler either.
NO_CACHE = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def guarded(numel: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """`numel` elements, `shift` after a 16-byte boundary, in the middle of memory filled with ones."""
    memory = torch.ones(2 * GUARD + shift + numel, dtype=dtype, device="cuda")
    return memory[GUARD + shift : GUARD + shift + numel]


def guards(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(0, dtype=tensor.dtype, device="cuda").set_(tensor.untyped_storage())
    begin = tensor.storage_offset()
    return torch.cat([memory[:begin], memory[begin + tensor.numel() :]])


def random_values(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values of many magnitudes, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        values = torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=generator)
        return values.to(dtype).cuda()
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-30, 12, (numel,), generator=generator).double())
    for special, every in ((math.inf, 29), (-math.inf, 31), (math.nan, 37), (-0.0, 23)):
        values[every - 1 :: every] = special
    return values.to(dtype).cuda()


def scaled(source: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What the kernels promise, by torch's operations: the product in float (or double), one rounding."""
    if scale == 1.0 and source.dtype == dtype:
        return source.clone()
    in_double = torch.float64 in (source.dtype, dtype)
    product = source.to(torch.float64 if in_double else torch.float32)
    # A tensor, not a number: torch would multiply by the unrounded number in double.
    product = product * torch.tensor(scale, dtype=product.dtype, device="cuda")
    return product.to(torch.float32).to(dtype) if dtype.itemsize == 2 else product.to(dtype)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = BITS[actual.element_size()]
    same = actual.view(bits) == expected.view(bits)
    if actual.is_floating_point():
        same |= actual.isnan() & expected.isnan()
    assert same.all(), f"{(~same).sum()} elements differ, the first at {(~same).nonzero()[0].item()}"


def check(
    numels: list[int],
    flat_dtype: torch.dtype,
    dtype: torch.dtype,
    scale: float,
    *,
    flat_shift: int = 0,
    shifts: list[int] | None = None,
    gap: int = 0,
    seed: int = 1,
) -> None:
    """Packs, unpacks and compares, with the elements around every tensor and in the gaps."""
    offsets = [0] * len(numels)
    end = 0
    for k, numel in enumerate(numels):
        offsets[k] = end + gap
        end += gap + numel
    flat = guarded(end + gap, flat_dtype, flat_shift)
    tensors = [guarded(numel, dtype, (shifts or [0])[k % len(shifts or [0])]) for k, numel in enumerate(numels)]
    for k, tensor in enumerate(tensors):
        tensor.copy_(random_values(tensor.numel(), dtype, seed + k))
    originals = [tensor.clone() for tensor in tensors]
    expected = flat.clone()
    for offset, tensor in zip(offsets, tensors, strict=True):
        expected[offset : offset + tensor.numel()] = scaled(tensor, scale, flat_dtype)
    _C.pack_on_device(flat, tensors, offsets, scale)
    torch.cuda.synchronize()
    assert_same(flat, expected)
    assert (guards(flat) == 1).all()
    for tensor, original in zip(tensors, originals, strict=True):
        assert_same(tensor, original)

    for tensor in tensors:
        tensor.zero_()
    _C.unpack_on_device(flat, tensors, offsets, scale)
    torch.cuda.synchronize()
    for offset, tensor in zip(offsets, tensors, strict=True):
        assert_same(tensor, scaled(flat[offset : offset + tensor.numel()], scale, dtype))
        assert (guards(tensor) == 1).all()
    assert_same(flat, expected)


@pytest.mark.parametrize(("flat_dtype", "dtype"), PAIRS, ids=lambda dtype: name(dtype))
@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3])
def test_all_type_pairs(flat_dtype: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    check([1, 7, 100, 4096, 5000, 0, 70_001], flat_dtype, dtype, scale)


@pytest.mark.parametrize("dtype", WORDS, ids=name)
def test_integers_and_bool_are_copied(dtype: torch.dtype) -> None:
    check([1, 3, 100, 0, 70_001], dtype, dtype, 1.0, gap=1)


@pytest.mark.parametrize(
    ("flat_dtype", "dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float32),
    ],
    ids=name,
)
def test_any_alignment_of_both_ends(flat_dtype: torch.dtype, dtype: torch.dtype) -> None:
    for flat_shift in range(16 // flat_dtype.itemsize):
        for shift in range(16 // dtype.itemsize):
            check([5003, 33], flat_dtype, dtype, 0.5, flat_shift=flat_shift, shifts=[shift, 0], gap=3)


@pytest.mark.parametrize("count", [139, 144, 145, 1000, 1168, 1169, 1313, 2500])
def test_any_number_of_tensors(count: int) -> None:
    sizes = random.Random(count)
    numels = [sizes.choice([0, 1, 5, 64, 300]) for _ in range(count)]
    numels[count // 2] = 300_000
    check(numels, torch.float32, torch.float32, 0.125, shifts=[0, 1, 2])


def test_a_large_bucket_fills_a_bounded_grid() -> None:
    check([30_000_000, 11, 5_000_001], torch.bfloat16, torch.float32, 0.5)


@pytest.mark.parametrize("numels", [[], [0], [0, 0, 0]], ids=str)
def test_nothing_to_pack(numels: list[int]) -> None:
    check(numels, torch.float32, torch.float32, 0.5)
    stats = torch.full((2,), 7.0, dtype=torch.float64, device="cuda")
    flat = torch.ones(4, device="cuda")
    _C.pack_on_device(flat, [torch.empty(0, device="cuda") for _ in numels], numels, 0.5, stats)
    assert stats.tolist() == [0.0, 0.0]
    assert (flat == 1).all()


# Half and double of every 16-bit number exercise denormals, ties and overflow; the CPU's kernels are proved elsewhere.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
@pytest.mark.parametrize("flat_dtype", FLOATS, ids=name)
def test_every_16_bit_number(dtype: torch.dtype, flat_dtype: torch.dtype) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    for scale in (1.0, 0.5, 1 / 3, 2.0, 1e-4):
        flat = torch.zeros(65536, dtype=flat_dtype, device="cuda")
        _C.pack_on_device(flat, [every.cuda()], [0], scale)
        assert_same(flat, scaled(every.cuda(), scale, flat_dtype))
        on_cpu = every.to(torch.float64 if flat_dtype == torch.float64 else torch.float32)
        on_cpu = (on_cpu * torch.tensor(scale, dtype=on_cpu.dtype)).to(flat_dtype)
        assert_same(flat.cpu(), on_cpu)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name)
def test_narrowing_rounds_to_nearest_even_at_every_boundary(dtype: torch.dtype) -> None:
    every = torch.arange(-32768, 32767, dtype=torch.int32).to(torch.int16)
    here = every.view(dtype).double()
    following = (every + 1).view(dtype).double()
    middle = ((here + following) / 2).float()
    values = torch.cat([middle, *(torch.nextafter(middle, torch.tensor(end)) for end in (math.inf, -math.inf))])
    values = values[values.isfinite()]
    flat = torch.zeros(values.numel(), dtype=dtype, device="cuda")
    _C.pack_on_device(flat, [values.cuda()], [0])
    assert_same(flat.cpu(), values.to(dtype))
    _C.pack_on_device(flat, [values.double().cuda()], [0])
    assert_same(flat.cpu(), values.to(dtype))


def test_plain_copies_keep_the_payload_of_a_nan() -> None:
    bits = torch.tensor([0x7F800001, 0x7FABCDEF, -1, 0x7FC00000] * 5, dtype=torch.int32, device="cuda")
    flat = torch.zeros(bits.numel(), device="cuda")
    stats = torch.zeros(2, dtype=torch.float64, device="cuda")
    for optional in (None, stats):
        flat.zero_()
        _C.pack_on_device(flat, [bits.view(torch.float32)], [0], 1.0, optional)
        assert torch.equal(flat.view(torch.int32), bits)
    assert stats[1].item() == bits.numel()


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_in_place(dtype: torch.dtype) -> None:
    flat = guarded(70_003, dtype, 1)
    flat.copy_(random_values(flat.numel(), dtype, 5))
    expected = scaled(flat, 0.3, dtype)
    _C.pack_on_device(flat, [flat[:3], flat[3:]], [0, 3], 0.3)
    assert_same(flat, expected)
    assert (guards(flat) == 1).all()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=name)
def test_complex_tensors(dtype: torch.dtype) -> None:
    source = torch.randn(3001, dtype=dtype, device="cuda")
    flat = torch.zeros(3004, dtype=dtype, device="cuda")
    _C.pack_on_device(flat, [source], [3], 0.5)
    assert torch.equal(flat[3:], source * 0.5)
    assert (flat[:3] == 0).all()


# --- statistics ---


@pytest.mark.parametrize(("flat_dtype", "dtype"), PAIRS, ids=lambda dtype: name(dtype))
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_statistics_are_of_what_was_written(flat_dtype: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    tensors = [torch.randn(numel, device="cuda").to(dtype) for numel in (1, 5000, 300_001, 33)]
    offsets = [2, 3, 5003, 305_004]
    flat = torch.zeros(305_037, dtype=flat_dtype, device="cuda")
    stats = torch.full((2,), -1.0, dtype=torch.float64, device="cuda")
    _C.pack_on_device(flat, tensors, offsets, scale, stats)
    expected = flat.double().square().sum().item()
    # Sums of one sign: n additions err by n roundings at most.
    assert stats[0].item() == pytest.approx(expected, rel=flat.numel() * 2.0**-51)
    assert stats[1].item() == 0
    on_cpu, non_finite = _C.measure(flat.cpu())
    assert stats[0].item() == pytest.approx(on_cpu, rel=flat.numel() * 2.0**-51)
    assert non_finite == 0

    _C.unpack_on_device(flat, tensors, offsets, scale, stats)
    expected = sum(tensor.double().square().sum().item() for tensor in tensors)
    assert stats[0].item() == pytest.approx(expected, rel=flat.numel() * 2.0**-51)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_every_infinity_and_nan_is_counted(dtype: torch.dtype) -> None:
    source = random_values(200_003, dtype, 9)
    flat = torch.zeros(source.numel(), dtype=dtype, device="cuda")
    stats = torch.zeros(2, dtype=torch.float64, device="cuda")
    _C.pack_on_device(flat, [source[:7], source[7:]], [0, 7], 0.5, stats)
    assert stats[1].item() == (~flat.isfinite()).sum().item() > 0
    assert not math.isfinite(stats[0].item())


def test_statistics_of_more_than_one_launch_are_the_same_bits_every_time() -> None:
    tensors = [torch.randn(1 + 37 * k % 1000, device="cuda") for k in range(2500)]
    offsets = [0, *itertools.accumulate(tensor.numel() for tensor in tensors)]
    flat = torch.zeros(offsets.pop(), device="cuda")
    results = []
    for _ in range(5):
        stats = torch.zeros(2, dtype=torch.float64, device="cuda")
        _C.pack_on_device(flat, tensors, offsets, 0.1, stats)
        results.append(stats.view(torch.int64).tolist())
    assert results == results[:1] * 5
    assert stats[0].item() == pytest.approx(flat.double().square().sum().item(), rel=1e-9)


# --- streams and graphs ---


def test_kernels_run_on_the_current_stream() -> None:
    # Much work on another stream first: a kernel on the wrong stream would read what is not there yet.
    stream = torch.cuda.Stream()
    source = torch.zeros(1_000_000, device="cuda")
    flat = torch.zeros(1_000_000, device="cuda")
    stats = torch.zeros(2, dtype=torch.float64, device="cuda")
    matrix = torch.randn(2048, 2048, device="cuda") / 2048
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(50):
            matrix = matrix @ matrix
        source.fill_(3.0)
        _C.pack_on_device(flat, [source], [0], 0.5, stats)
    stream.synchronize()
    assert (flat == 1.5).all()
    assert stats.tolist() == [2.25 * 1_000_000, 0.0]


@pytest.mark.skipif(NO_CACHE, reason="without torch's allocator nothing may be allocated")
def test_a_captured_graph_replays_packing() -> None:
    tensors = [torch.zeros(numel, device="cuda") for numel in (1000, 3, 70_000)]
    flat = torch.zeros(71_003, device="cuda")
    stats = torch.zeros(2, dtype=torch.float64, device="cuda")
    offsets = [0, 1000, 1003]
    _C.pack_on_device(flat, tensors, offsets, 0.5, stats)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _C.pack_on_device(flat, tensors, offsets, 0.5, stats)
    for value in (2.0, 4.0):
        for tensor in tensors:
            tensor.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert (flat == value / 2).all()
        assert stats.tolist() == [value * value / 4 * 71_003, 0.0]


@pytest.mark.skipif(NO_CACHE, reason="compute-sanitizer and torch's profiler exclude each other")
@pytest.mark.parametrize(
    ("count", "launches", "with_stats"), [(1, 1, False), (1000, 1, False), (1169, 2, False), (1000, 2, True)]
)
def test_a_bucket_is_one_launch(count: int, launches: int, with_stats: bool) -> None:
    tensors = [torch.ones(10, device="cuda") for _ in range(count)]
    flat = torch.zeros(10 * count, device="cuda")
    stats = torch.zeros(2, dtype=torch.float64, device="cuda") if with_stats else None
    offsets = list(range(0, 10 * count, 10))
    _C.pack_on_device(flat, tensors, offsets, 0.5, stats)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _C.pack_on_device(flat, tensors, offsets, 0.5, stats)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ours = [kernel for kernel in kernels if "pack_kernel" in kernel or "total_kernel" in kernel]
    assert len(ours) == launches, kernels


# --- what is refused ---


def ones(*sizes: int) -> torch.Tensor:
    return torch.ones(*sizes, device="cuda")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: _C.pack_on_device(torch.ones(4), [ones(4)], [0]), "flat must be a CUDA tensor"),
        (lambda: _C.pack_on_device(ones(2, 2), [ones(4)], [0]), "one dimension"),
        (lambda: _C.pack_on_device(ones(8)[::2], [ones(4)], [0]), "contiguous"),
        (lambda: _C.pack_on_device(ones(4), [torch.ones(4)], [0]), "is on cpu"),
        (lambda: _C.pack_on_device(ones(4), [ones(8)[::2]], [0]), "must be contiguous"),
        (lambda: _C.pack_on_device(ones(4), [ones(2), ones(2).half()], [0, 2]), "one dtype per call"),
        (lambda: _C.pack_on_device(ones(4), [ones(4)], [0, 1]), "1 tensors and 2 offsets"),
        (lambda: _C.pack_on_device(ones(4), [ones(4)], [1]), "do not lie within flat's 4"),
        (lambda: _C.pack_on_device(ones(4), [ones(4)], [-1]), "do not lie within flat's 4"),
        (lambda: _C.pack_on_device(ones(4), [ones(4).int()], [0]), "only floating point"),
        (lambda: _C.pack_on_device(ones(4).int(), [ones(4).int()], [0], 0.5), "scale 0.5"),
        (lambda: _C.pack_on_device(ones(4), [ones(2).cfloat()], [0]), "complex"),
        (lambda: _C.pack_on_device(ones(4), [ones(4)], [0], 1.0, ones(2)), "float64 tensor of 2"),
        (lambda: _C.unpack_on_device(ones(4), [ones(4)], [1]), "do not lie within flat's 4"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], None], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        call()
