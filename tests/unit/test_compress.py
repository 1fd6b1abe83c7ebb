"""Compression: compiled kernels against the torch operators used on GPUs; slot layouts and residuals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness import each
from torchddp import _C
from torchddp.comm_hooks import formats
from torchddp.comm_hooks.layout import Layout, Residuals, Slot

FORMATS = ("int8", "int4", "fp16", "bf16")

# Lengths around block sizes; magnitudes from blocks treated as zeros to overflowing sums of squares.
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


def assert_alike(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Allow for ties between two codes."""
    halfway = (ours != theirs) & theirs.isfinite() & (name in ("int8", "int4"))
    assert halfway.sum() <= 2
    ours = torch.where(halfway, theirs, ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-44, equal_nan=True)


@given(vectors, st.sampled_from([None, math.nan, math.inf]), st.floats(0.1, 2), st.booleans())
def test_kernels_agree_with_the_operators(source: Tensor, bad: float | None, scale: float, feedback: bool) -> None:
    numel = source.numel()
    if bad is not None and numel:
        source[numel // 2] = bad
    for name in FORMATS:
        data, expected, total = torch.empty(_C.compressed_bytes(name, numel), dtype=torch.uint8), *torch.ones(2, numel)
        theirs = source.flip(0).nan_to_num(posinf=1.0) if feedback else None
        ours = None if theirs is None else theirs.clone()
        formats.compress_reference(name, source, data, theirs, scale)
        formats.decompress_reference(name, data, expected)
        torch.testing.assert_close(decode(name, data, numel), expected, rtol=0, atol=0, equal_nan=True)
        assert_alike(name, decode(name, encode(name, source, ours, scale), numel), expected)
        if theirs is not None and ours is not None:
            assert_alike(name, ours, theirs)
        formats.decompress_reference(name, data, total, True)
        torch.testing.assert_close(total, expected + 1, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_kernels_accept_unaligned_slices_and_stay_within_them(name: str) -> None:
    source = torch.randn(3001, generator=torch.Generator().manual_seed(3))
    size = _C.compressed_bytes(name, 3000)
    out, values = torch.full((size + 5,), 0xA5, dtype=torch.uint8), torch.full((3002,), 7.0)
    _C.compress(name, source[1:], out[3:-2])
    _C.decompress(name, out[3:-2], values[1:-1])
    assert torch.equal(out[3:-2], encode(name, source[1:].clone()))
    assert torch.equal(values[1:-1], decode(name, out[3:-2].clone(), 3000))
    assert [out[i].item() for i in (0, 1, 2, -2, -1)] == [0xA5] * 5
    assert values[0] == values[-1] == 7.0


SOURCE, OUT = torch.ones(300), torch.empty(308, dtype=torch.uint8)


def test_invalid_arguments_are_named() -> None:
    cases = (
        ("compressed_bytes", ("int9", 3), ValueError, "'int9'; allowed are int8, int4, fp16 and bf16"),
        ("compressed_bytes", ("int8", -1), ValueError, r"between 0 and 2\*\*58, got -1"),
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
    )
    for function, arguments, error, message in each(cases):
        with pytest.raises(error, match=message):
            getattr(_C, function)(*arguments)


A, B, C = Slot("a", 0, (2, 2), 4), Slot("b", 8, (3,), 3), Slot("c", 11, (2,), 2)
PADDED = Layout((A, B, C), 16)
SHAPES = {"a": torch.Size((2, 2)), "b": torch.Size((3,)), "c": torch.Size((2,))}


def test_gaps_between_slots_are_found_and_overlaps_refused():
    assert PADDED.gaps == ((4, 8), (13, 16))
    assert Layout.packed(PADDED.slots) == Layout((A, Slot("b", 4, (3,), 3), Slot("c", 7, (2,), 2)), 9)
    with pytest.raises(ValueError, match="b begins at 8, before the end of the previous slot, 13"):
        Layout((C, B), 16)
    with pytest.raises(ValueError, match="13 elements of 12"):
        Layout((C,), 12)


def test_residuals_follow_parameters_to_other_layouts_and_ranks():
    residuals, like = Residuals(), torch.empty(0)
    held = residuals.of(PADDED, like, 0, 16)
    held.copy_(torch.arange(16.0))
    again = residuals.of(PADDED, like, 0, 16)
    assert again.data_ptr() == held.data_ptr()
    assert again[4:8].tolist() == [0.0] * 4  # belongs to no parameter
    moved = residuals.of(Layout.packed((C, A)), like, 0, 6)
    assert moved.tolist() == [11, 12, 0, 1, 2, 3]
    moved[0] = 20.0
    state = {name: value.tolist() for name, value in residuals.state_dict(SHAPES).items()}
    assert state == {"a": [[0, 1], [2, 3]], "b": [8, 9, 10], "c": [20, 12]}
    # Two ranks hold a half each; in other buckets they hold other halves, with nothing lost.
    like, ranks = torch.empty(0), [Residuals(), Residuals()]
    for index, residuals in enumerate(ranks):
        residuals.of(PADDED, like, 8 * index, 8 * index + 8).copy_(torch.arange(8.0) + 8 * index)
    packed = Layout.packed((C, B, A))
    whole = sum(ranks[i]._collect(packed, like, None) for i in range(2))
    assert whole.tolist() == [11, 12, 8, 9, 10, 0, 1, 2, 3]
    halves = [r.of(packed, like, 5 * i, 5 * i + 5, lambda flat: flat.copy_(whole)) for i, r in enumerate(ranks)]
    assert torch.cat(halves).tolist() == [*whole.tolist(), 0.0]
    states = [residuals.state_dict(SHAPES) for residuals in ranks]
    loaded = Residuals()
    loaded.load_state_dict({name: states[0][name] + states[1][name] for name in SHAPES})
    assert loaded.of(PADDED, like, 0, 16).tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 8, 9, 10, 11, 12, 0, 0, 0]
