"""Hashes of tensors' bits: 64 bits each, at the speed of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from torchddp import _C

_AT_ONCE = 4 * 2**20  # elements: 128 MiB of memory for a part
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLACE, _FIRST, _SECOND = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@torch.no_grad()
def hash_tensors(tensors: Sequence[torch.Tensor], *, by_operators: bool = False) -> list[int]:
    """Of each tensor a hash of its bits in logical order: 0.0 and -0.0 differ, equal NaNs don't.

    On the CPU a kernel does it. Elsewhere, or if ``by_operators``, torch's operators give another hash, with one wait
    for each device.

    Args:
        tensors: strided, of any dtype. RuntimeError for others.
    """
    hashes = [0] * len(tensors)
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or tensor.is_meta:
            raise RuntimeError(f"tensor {index} has no memory to hash: got {tensor.layout} on {tensor.device}")
        values = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.is_cpu and not by_operators:
            hashes[index] = _C.hash_tensor(values)
        else:
            sums[tensor.device].append((index, _sum_of_words(values)))
    for found in sums.values():
        for (index, _), word in zip(found, torch.stack([total for _, total in found]).tolist(), strict=True):
            # The length too: zeros at the end must count.
            hashes[index] = _C.hash_tensor(torch.tensor([word, tensors[index].nbytes]))
    return hashes


def _sum_of_words(values: torch.Tensor) -> torch.Tensor:
    """A bijection (splitmix64) of each word, another one in each place, and the sum: 0-d int64, on the device."""
    real = torch.view_as_real(values) if values.is_complex() else values
    words = real.reshape(-1).view(_WORDS[real.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for begin in range(0, words.numel(), _AT_ONCE):
        part = words[begin : begin + _AT_ONCE]
        mixed = torch.arange(begin + 1, begin + 1 + part.numel(), dtype=torch.int64, device=values.device)
        mixed.mul_(_PLACE).add_(part)
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
            mixed.bitwise_xor_((mixed >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)  # as if unsigned
        total += mixed.sum()
    return total
