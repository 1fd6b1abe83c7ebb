"""Compressed numbers: closed forms of each format, the reference operators against the compiled kernels."""

import math

import pytest
import torch

from torchddp.comm_hooks import formats

BLOCKED = ["int8", "int4", "sign"]
SIZES = [0, 1, 2, 7, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 5000]
NAN = float("nan")


def numbers(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def round_trip(format, source, residual=None, scale=1.0, reference=True):
    suffix = "_reference" if reference else ""
    message = torch.empty(formats.compressed_bytes(format, source.numel()), dtype=torch.uint8)
    getattr(formats, f"compress{suffix}")(format, source, message, residual, scale)
    out = torch.empty_like(source)
    getattr(formats, f"decompress{suffix}")(format, message, out)
    return message, out


@pytest.mark.parametrize("size", SIZES)
def test_sizes(size):
    expected = {
        "fp16": 2 * size,
        "bf16": 2 * size,
        "int8": 4 * math.ceil(size / 256) + size,
        "int4": 4 * math.ceil(size / 64) + math.ceil(size / 2),
        "sign": 4 * math.ceil(size / 1024) + math.ceil(size / 8),
    }
    assert {format: formats.compressed_bytes(format, size) for format in formats.FORMATS} == expected


def test_unknown_format():
    with pytest.raises(ValueError, match="'int3'; allowed are int8, int4, sign, fp16 and bf16"):
        formats.compressed_bytes("int3", 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("format", "largest"), [("int8", 127), ("int4", 7)])
def test_whole_multiples_of_the_scale_are_exact(format, largest, size):
    block = formats.FORMATS[format]
    source = torch.arange(size).remainder(2 * largest + 1).sub(largest).float() * 0.25
    source[::block] = largest * 0.25  # every block has its peak
    assert torch.equal(round_trip(format, source)[1], source)


@pytest.mark.parametrize(("format", "levels"), [("int8", 127), ("int4", 7)])
def test_error_is_at_most_half_a_step(format, levels):
    source = numbers(5000)
    out = round_trip(format, source)[1]
    for begin in range(0, 5000, formats.FORMATS[format]):
        block = slice(begin, begin + formats.FORMATS[format])
        step = source[block].abs().max() / levels
        assert (out[block] - source[block]).abs().max() <= step * 0.50001
    assert not torch.equal(out, source)


def test_bits_of_a_message():
    message, out = round_trip("int4", torch.tensor([7.0, -7.0, 0.0, 3.0, -1.0]))
    assert message[:4].view(torch.float32).item() == 1.0
    assert message[4:].tolist() == [15 | (1 << 4), 8 | (11 << 4), 7]
    message, out = round_trip("sign", torch.tensor([3.0, -1.0, 0.0, -0.0, 2.0, 2.0, -2.0, 6.0, -2.0]))
    assert message[:4].view(torch.float32).item() == 2.0
    assert message[4:].tolist() == [0b10110101, 0]
    assert out.tolist() == [2.0, -2.0, 2.0, -2.0, 2.0, 2.0, -2.0, 2.0, -2.0]
    message, out = round_trip("int8", torch.tensor([127.0, -127.0, 0.5, 1.5, -3.0]))
    assert message[4:].view(torch.int8).tolist() == [127, -127, 0, 2, -3]  # halves go to the even neighbour


@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("size", [1, 65, 3000])
def test_residual_is_what_the_codes_miss(format, size):
    source, before = numbers(size), numbers(size, 1) * 0.01
    residual = before.clone()
    out = round_trip(format, source, residual, 0.5)[1]
    torch.testing.assert_close(out + residual, source * 0.5 + before, rtol=1e-6, atol=1e-6)
    assert not torch.equal(residual, before)


@pytest.mark.parametrize("format", BLOCKED)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_a_bad_number_spoils_its_block_alone(format, bad):
    block = formats.FORMATS[format]
    source, residual = numbers(3 * block), torch.ones(3 * block)
    source[block + 5] = bad
    out = round_trip(format, source, residual)[1]
    assert torch.isnan(out[block : 2 * block]).all()
    assert torch.isfinite(out[:block]).all() and torch.isfinite(out[2 * block :]).all()
    assert (residual[block : 2 * block] == 0).all() and torch.isfinite(residual).all()


@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_casts_keep_bad_numbers(format):
    source, residual = torch.tensor([1.0, NAN, float("inf"), 1e30]), torch.zeros(4)
    out = round_trip(format, source, residual)[1]
    assert torch.isnan(out[1]) and out[2] == float("inf") and torch.isfinite(residual).all()
    assert out[0] == 1.0 and (out[3] == float("inf")) == (format == "fp16")


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_zeros_and_the_smallest_numbers(format):
    source = torch.tensor([0.0, 1e-45, -1e-44])
    residual = torch.zeros(3)
    assert (round_trip(format, source, residual)[1] == 0).all()
    assert torch.equal(residual, source)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_accumulate(format):
    source = numbers(700)
    message, out = round_trip(format, source)
    total = torch.ones(700)
    formats.decompress_reference(format, message, total, True)
    assert torch.equal(total, out + 1)


def test_top_k():
    source = torch.tensor([1.0, -5.0, 2.0, 5.0, -2.0, 0.0])
    indices, values = torch.empty(3, dtype=torch.int32), torch.empty(3)
    residual = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.25])
    formats.select_top_k_reference(source, 3, indices, values, residual, 2.0)
    assert indices.tolist() == [1, 2, 3]  # of 2 and -2 the first
    assert values.tolist() == [-10.0, 4.0, 10.0]
    assert residual.tolist() == [2.0, 0.0, 0.0, 0.0, -4.0, 0.25]


def test_top_k_of_bad_numbers():
    source = torch.tensor([1.0, NAN, float("inf"), 9.0, NAN])
    indices, values, residual = torch.empty(2, dtype=torch.int32), torch.empty(2), torch.zeros(5)
    formats.select_top_k_reference(source, 2, indices, values, residual)
    assert indices.tolist() == [1, 4] and torch.isnan(values).all()
    assert residual.tolist() == [1.0, 0.0, 0.0, 9.0, 0.0]


@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_kernels_agree_with_the_reference(format, size):
    source, residual = numbers(size), numbers(size, 1)
    if size > 300:
        source[3], source[-1] = NAN, float("inf")
    theirs = residual.clone()
    message, out = round_trip(format, source, residual, 0.25)
    their_message, their_out = round_trip(format, source, theirs, 0.25, reference=False)
    if format == "sign":  # means are summed in another order
        torch.testing.assert_close(out, their_out, rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(residual, theirs, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(out, their_out, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(residual, theirs)
