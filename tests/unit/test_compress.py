"""The compression kernels against torch's own operations, and what the formats promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchddp import _C

FORMATS = ("int8", "int4", "sign", "fp16", "bf16")
BLOCKED = {"int8": 256, "int4": 64, "sign": 1024}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MOST = {"int8": 127, "int4": 7}

# Lengths around blocks; magnitudes from where a block counts as zeros to where sums of squares would overflow.
vectors = st.builds(
    lambda numel, seed, magnitude: torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude,
    st.integers(0, 2100),
    st.integers(0, 2**31),
    st.integers(-40, 36),
)


def encode(name: str, source: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> Tensor:
    out = torch.empty(_C.compressed_bytes(name, source.numel()), dtype=torch.uint8)
    _C.compress(name, source, out, residual, scale)
    return out


def decode(name: str, data: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), math.nan)
    _C.decompress(name, data, out)
    return out


def padded_blocks(name: str, source: Tensor) -> Tensor:
    """[blocks, block] with zeros behind the last one."""
    block = BLOCKED[name]
    return torch.nn.functional.pad(source, (0, -source.numel() % block)).view(-1, block)


def reference_values(name: str, source: Tensor) -> tuple[Tensor, Tensor]:
    """(one scale per block, what each number is worth) of finite numbers that a format with blocks can hold."""
    blocks = padded_blocks(name, source)
    if name == "sign":
        counts = padded_blocks(name, torch.ones_like(source)).sum(1)
        scales = blocks.double().abs().sum(1).div(counts).float()
        return scales, scales[:, None].copysign(blocks).view(-1)[: source.numel()]
    largest = blocks.abs().amax(1)
    inverse = MOST[name] / largest
    is_zero = inverse.isinf()
    codes = (blocks * inverse.masked_fill(is_zero, 0)[:, None]).round().clamp(-MOST[name], MOST[name])
    scales = (largest / MOST[name]).masked_fill(is_zero, 0)
    return scales, (codes * scales[:, None]).view(-1)[: source.numel()]


def sent_scales(name: str, data: Tensor, numel: int) -> Tensor:
    return data[: 4 * -(-numel // BLOCKED[name])].clone().view(torch.float32)


@settings(deadline=None)
@given(vectors)
def test_quantised_values_are_those_of_torch(source: Tensor) -> None:
    for name in ("int8", "int4"):
        scales, expected = reference_values(name, source)
        data = encode(name, source)
        assert torch.equal(sent_scales(name, data, source.numel()), scales)
        assert torch.equal(decode(name, data, source.numel()), expected)


@settings(deadline=None)
@given(vectors)
def test_signs_are_those_of_torch_and_their_scale_is_the_mean(source: Tensor) -> None:
    scales, expected = reference_values("sign", source)
    data = encode("sign", source)
    # torch adds in another order.
    torch.testing.assert_close(sent_scales("sign", data, source.numel()), scales, rtol=1e-6, atol=1e-44)
    actual = decode("sign", data, source.numel())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-44)
    assert torch.equal(actual.signbit(), source.signbit())


@pytest.mark.parametrize("name", HALVES)
def test_casts_are_those_of_torch(name: str) -> None:
    source = torch.randn(1003, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.linspace(-9, 9, 1003)
    source[5], source[600], source[1002] = math.inf, math.nan, -0.0
    data = encode(name, source, scale=0.3)
    sent, expected = data.view(HALVES[name]), (source * 0.3).to(HALVES[name])
    numbers = ~expected.isnan()  # torch's NaNs have payloads of their own
    assert torch.equal(sent.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])
    assert sent.isnan().equal(~numbers)
    torch.testing.assert_close(decode(name, data, 1003), expected.float(), rtol=0, atol=0, equal_nan=True)


@settings(deadline=None)
@given(vectors)
def test_the_error_is_at_most_half_a_step(source: Tensor) -> None:
    for name, most in MOST.items():
        block = BLOCKED[name]
        largest = padded_blocks(name, source).abs().amax(1).repeat_interleave(block)[: source.numel()].double()
        error = (decode(name, encode(name, source), source.numel()).double() - source.double()).abs()
        # Half a step, and the roundings of scale, quotient and product; tiny blocks count as zeros.
        allowed = torch.where(largest < most / 3.4e38, largest, largest / most * (0.5 + most * 2e-7) + 1e-43 * most)
        assert (error <= allowed).all()


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(FORMATS), st.integers(1, 1500), st.integers(0, 2**31))
def test_error_feedback_telescopes(name: str, numel: int, seed: int) -> None:
    """What was sent over all steps and what is kept make up the sum of all gradients."""
    generator = torch.Generator().manual_seed(seed)
    residual, sent, total = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel, dtype=torch.float64)
    kept = 0.0
    for _ in range(20):
        gradient = torch.randn(numel, generator=generator)
        total += gradient.double() * 0.25
        _C.decompress(name, encode(name, gradient, residual, 0.25), sent, accumulate=True)
        kept = max(kept, residual.abs().max().item())
    torch.testing.assert_close(sent.double() + residual.double(), total, rtol=0, atol=1e-4)
    assert kept < {"fp16": 1e-2, "bf16": 1e-1, "int8": 0.1, "int4": 0.5, "sign": 25}[name]  # it does not grow


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_block_stays_visible_and_out_of_the_residual(name: str, bad: float) -> None:
    block = BLOCKED[name]
    source = torch.randn(3 * block, generator=torch.Generator().manual_seed(2))
    source[block + 3] = bad
    residual = torch.ones(3 * block)
    decoded = decode(name, encode(name, source, residual), 3 * block)
    assert decoded.view(3, block).isnan().all(1).tolist() == [False, True, False]
    assert decoded.isnan().sum() == block
    assert residual.isfinite().all()
    assert (residual[block : 2 * block] == 0).all()
    # The next step is whole again.
    assert decode(name, encode(name, torch.ones(3 * block), residual), 3 * block).isfinite().all()


@pytest.mark.parametrize("name", HALVES)
def test_a_broken_number_stays_visible_and_out_of_the_residual(name: str) -> None:
    source = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.4e38, 0.3])
    residual = torch.full((6,), 0.125)
    decoded = decode(name, encode(name, source, residual), 6)
    assert decoded[1].isnan()
    assert decoded[2] == math.inf
    assert decoded[3] == -math.inf
    assert residual.isfinite().all()
    assert (residual[1:4] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_slices_at_any_offset(name: str) -> None:
    source = torch.randn(3001, generator=torch.Generator().manual_seed(3))
    size = _C.compressed_bytes(name, 3000)
    out, values = torch.full((size + 5,), 0xA5, dtype=torch.uint8), torch.full((3002,), 7.0)
    _C.compress(name, source[1:], out[3:-2])
    _C.decompress(name, out[3:-2], values[1:-1])
    assert torch.equal(out[3:-2], encode(name, source[1:].clone()))
    assert torch.equal(values[1:-1], decode(name, out[3:-2].clone(), 3000))
    assert [out[i].item() for i in (0, 1, 2, -2, -1)] == [0xA5] * 5
    assert values[0] == values[-1] == 7.0


def reference_top_k(values: Tensor, k: int) -> Tensor:
    magnitudes = values.abs().nan_to_num(nan=math.inf, posinf=3.5e38)
    keys = torch.where(values.isnan(), 2.0, torch.where(values.isinf(), 1.0, 0.0))
    by_magnitude = magnitudes.argsort(descending=True, stable=True)
    order = by_magnitude[keys[by_magnitude].argsort(descending=True, stable=True)]
    return order[:k].sort().values.int()


def top_k(source: Tensor, k: int, residual: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
    _C.select_top_k(source, k, indices, values, residual, scale)
    return indices, values


@settings(deadline=None)
@given(vectors, st.floats(0, 1), st.integers(0, 3), st.floats(0.1, 2))
def test_top_k_is_a_stable_sort(source: Tensor, share: float, decimals: int, scale: float) -> None:
    source = source.nan_to_num().round(decimals=decimals)  # many ties
    if source.numel() > 3:
        source[1], source[-2], source[2] = math.nan, math.nan, -math.inf
    k = int(share * source.numel())
    residual = source.flip(0).nan_to_num(posinf=1.0, neginf=1.0)
    values = source * scale + residual
    indices, chosen = top_k(source, k, residual, scale)
    assert torch.equal(indices, reference_top_k(values, k))
    torch.testing.assert_close(chosen, values[indices.long()], rtol=0, atol=0, equal_nan=True)
    expected = torch.where(values.isfinite(), values, 0.0)
    expected[indices.long()] = 0
    assert torch.equal(residual, expected)
    scaled = source * scale
    assert torch.equal(top_k(source, k, scale=scale)[0], reference_top_k(scaled, k))


SOURCE, OUT = torch.ones(300), torch.empty(308, dtype=torch.uint8)
NINE, INDICES, VALUES = torch.ones(9), torch.empty(4, dtype=torch.int32), torch.empty(4)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        ("compressed_bytes", ("int9", 3), ValueError, "'int9'; allowed are int8, int4, sign, fp16 and bf16"),
        ("compressed_bytes", ("int8", -1), ValueError, r"between 0 and 2\*\*60, got -1"),
        ("compressed_bytes", ("int8", 2**61), ValueError, "between 0 and"),
        ("compress", ("int8", SOURCE.double(), OUT), TypeError, "source must have .* Float, got Double"),
        ("compress", ("int8", SOURCE, OUT.char()), TypeError, "out must have .* Byte, got Char"),
        ("compress", ("int8", SOURCE.to("meta"), OUT), TypeError, "source must be a dense CPU .* on meta"),
        ("compress", ("int8", torch.ones(600)[::2], OUT), ValueError, r"contiguous, .* strides \[2\]"),
        ("compress", ("int8", SOURCE, OUT[1:]), ValueError, "out must have 308 elements, got 307"),
        ("compress", ("int8", SOURCE, OUT, torch.ones(299)), ValueError, "residual must have 300 .* got 299"),
        ("compress", ("int8", SOURCE, OUT, SOURCE), ValueError, "source and residual share memory"),
        ("compress", ("fp16", SOURCE, SOURCE.view(torch.uint8)[:600]), ValueError, "source and out share"),
        ("decompress", ("int8", OUT[1:], SOURCE), ValueError, "data must have 308 elements, got 307"),
        ("decompress", ("int8", OUT, SOURCE.half()), TypeError, "out must have .* Float, got Half"),
        ("decompress", ("fp16", SOURCE.view(torch.uint8)[:600], SOURCE), ValueError, "data and out share"),
        ("select_top_k", (NINE, -1, INDICES, VALUES), ValueError, "between 0 and the 9 .* got -1"),
        ("select_top_k", (NINE, 10, INDICES, VALUES), ValueError, "between 0 and the 9 .* got 10"),
        ("select_top_k", (NINE, 3, INDICES, VALUES), ValueError, "indices must have 3 elements, got 4"),
        ("select_top_k", (NINE, 4, INDICES.long(), VALUES), TypeError, "indices must have .* Int, got Long"),
        ("select_top_k", (NINE, 4, INDICES, VALUES[:3]), ValueError, "values must have 4 elements, got 3"),
        ("select_top_k", (NINE, 4, INDICES, NINE[:4]), ValueError, "source and values share memory"),
        ("select_top_k", (NINE, 4, INDICES, VALUES, NINE), ValueError, "source and residual share"),
    ],
)
def test_bad_arguments_are_named(function: str, arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(_C, function)(*arguments)


@pytest.mark.slow
def test_top_k_counts_its_elements_in_32_bits() -> None:
    # Never touched: the check comes first. Where so much can't even be reserved, there is nothing to refuse.
    try:
        source = torch.empty(2**31 + 1)
    except RuntimeError as error:
        pytest.skip(str(error))
    with pytest.raises(ValueError, match=r"at most 2\*\*31 elements"):
        top_k(source, 0)
