"""Compressed number formats: how fp32 values are stored in fewer bits, as torch operators.

Values are coded in blocks of B neighbors with one fp32 scale per block (Dettmers, 8-bit approximations, ICLR 2016, and
blockwise quantization, Dettmers et al., ICLR 2022). A message is all scales, then all codes.

The functions here work on any device; CPU tensors go through compiled kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchddp import _C

_BLOCKS = {"int8": 256, "int4": 64}  # elements that share a scale
_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LARGEST_CODE = {"int8": 127.0, "int4": 7.0}


def compress(format: str, source: Tensor, out: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> None:
    """Write ``v = source * scale + residual`` to ``out`` in ``format``; the residual becomes the coding error.

    A block with NaN or Inf becomes NaN after :func:`decompress`, with a zero residual, so that the next step is
    unaffected. ``source``: fp32 [n], contiguous. ``out``: uint8 [_C.compressed_bytes(format, n)], contiguous.
    ``residual``: fp32 [n], updated in place; None: no error feedback.
    """
    code = _C.compress if source.device.type == "cpu" else compress_reference
    code(format, source, out, residual, scale)


def decompress(format: str, data: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """Write (or add) a message's values to ``out``: uint8 [_C.compressed_bytes(format, n)] -> fp32 [n], contiguous."""
    decode = _C.decompress if out.device.type == "cpu" else decompress_reference
    decode(format, data, out, accumulate)


# --- the same in torch operators ---


def compress_reference(
    format: str, source: Tensor, out: Tensor, residual: Tensor | None = None, scale: float = 1.0
) -> None:
    value = source * scale
    if residual is not None:
        value.add_(residual)
    if format in _CASTS:
        out.view(_CASTS[format]).copy_(value)
    else:
        _encode_blocks(format, value, out)
    if residual is None:
        return
    decoded = torch.empty_like(value)
    decompress_reference(format, out, decoded)
    torch.sub(value, decoded, out=residual)
    residual.masked_fill_(~torch.isfinite(residual), 0.0)


def decompress_reference(format: str, data: Tensor, out: Tensor, accumulate: bool = False) -> None:
    if format in _CASTS:
        value = data.view(_CASTS[format])
        out.add_(value) if accumulate else out.copy_(value)
        return
    numel = out.numel()
    scales, codes = _split(format, data, numel)
    rows = _as_blocks(format, _decode_codes(format, codes, numel))
    value = (rows * scales[:, None]).view(-1)[:numel]
    out.add_(value) if accumulate else out.copy_(value)


def _pad_to(value: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(value, (0, -value.numel() % multiple))


def _as_blocks(format: str, value: Tensor) -> Tensor:
    return _pad_to(value, _BLOCKS[format]).view(-1, _BLOCKS[format])


def _split(format: str, data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    size = 4 * -(-numel // _BLOCKS[format])
    return data[:size].view(torch.float32), data[size:]


def _encode_blocks(format: str, value: Tensor, out: Tensor) -> None:
    """Write scales and codes."""
    numel = value.numel()
    rows = _as_blocks(format, value)
    scales, codes = _split(format, out, numel)
    not_finite = ~torch.isfinite(rows).all(1)
    largest = _LARGEST_CODE[format]
    peak = rows.abs().amax(1) if numel else scales
    inverse = largest / peak
    empty = torch.isinf(inverse)  # blocks of zeros, or of numbers too small to tell from zero
    block_scales = (peak / largest).masked_fill_(empty, 0.0)
    inverse = inverse.masked_fill(empty | not_finite, 0.0)
    whole = torch.nan_to_num((rows * inverse[:, None]).round_(), 0.0, 0.0, 0.0).clamp_(-largest, largest)
    whole = whole.view(-1)[:numel]
    if format == "int8":
        codes.copy_(whole.to(torch.int8).view(torch.uint8))
    else:
        nibbles = _pad_to((whole + 8.0).to(torch.uint8), 2).view(-1, 2)
        codes.copy_(nibbles[:, 0] | (nibbles[:, 1] << 4))
    scales.copy_(block_scales.masked_fill(not_finite, float("nan")))


def _decode_codes(format: str, codes: Tensor, numel: int) -> Tensor:
    if format == "int8":
        return codes.view(torch.int8).to(torch.float32)
    nibbles = torch.stack((codes & 15, codes >> 4), 1).view(-1)[:numel]
    return nibbles.to(torch.float32).sub_(8.0)
