"""Compressed numbers: closed forms of each format, the reference operators against the compiled kernels."""

import math

import pytest
import torch

from torchddp.comm_hooks import formats

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
@pytest.mark.parametrize("size", SIZES)
def test_kernels_agree_with_the_reference(format, size):
    source, residual = numbers(size), numbers(size, 1)
    if size > 300:
        source[3], source[-1] = NAN, float("inf")
    if size > 2000:  # a block of the smallest numbers, which counts as zeros
        source[1024:2048], residual[1024:2048] = 1e-44, 0.0
    theirs = residual.clone()
    message, out = round_trip(format, source, residual, 0.25)
    their_message, their_out = round_trip(format, source, theirs, 0.25, reference=False)
    if format == "sign":  # means are summed in another order
        torch.testing.assert_close(out, their_out, rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(residual, theirs, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(out, their_out, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(residual, theirs)
    total = torch.ones(size)
    formats.decompress_reference(format, message, total, True)
    torch.testing.assert_close(total, out + 1, equal_nan=True)


@pytest.mark.parametrize("bad", [[], [NAN, float("inf"), NAN]])
@pytest.mark.parametrize("k", [0, 1, 3, 40])
def test_both_select_the_same_top_k(k, bad):
    source = torch.tensor([*bad, 1.0, -5.0, 2.0, 5.0, -2.0, 0.0, *numbers(60).round(decimals=1).tolist()])
    found = []
    for select in (formats.select_top_k_reference, formats.select_top_k):
        indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
        residual = numbers(len(source), 1).round(decimals=1)
        select(source, k, indices, values, residual, 2.0)
        found.append((indices, values, residual))
    for reference, kernel in zip(*found, strict=True):
        torch.testing.assert_close(reference, kernel, rtol=0, atol=0, equal_nan=True)
