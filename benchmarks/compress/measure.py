"""Times every kernel and the copy in turn, round by round, on one core."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from torchddp import _C

FORMATS = ("int8", "int4", "sign", "fp16", "bf16")
COPY = "memcpy"
TOP_K = "top-k"
# Small arrays are processed repeatedly, up to this many bytes per measurement, so that the clock's cost is negligible.
MEASURED_BYTES = 4 << 20

Call = Callable[[], object]


def make_calls(nbytes: int, formats: Sequence[str], top_k_share: float, seed: int) -> dict[tuple[str, str], Call]:
    """The calls to time, by (what, how), for `nbytes` of fp32; `memcpy` comes first, top-k last."""
    numel = nbytes // 4
    source = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    out, residual = torch.zeros(numel), torch.zeros(numel)
    calls: dict[tuple[str, str], Call] = {
        (COPY, ""): lambda: ctypes.memmove(out.data_ptr(), source.data_ptr(), nbytes),
    }
    for name in formats:
        data = torch.zeros(_C.compressed_bytes(name, numel), dtype=torch.uint8)

        def compress(name: str = name, data: torch.Tensor = data) -> None:
            _C.compress(name, source, data)

        def compress_residual(name: str = name, data: torch.Tensor = data) -> None:
            _C.compress(name, source, data, residual)

        def decompress(name: str = name, data: torch.Tensor = data) -> None:
            _C.decompress(name, data, out)

        def accumulate(name: str = name, data: torch.Tensor = data) -> None:
            _C.decompress(name, data, out, accumulate=True)

        calls[name, "compress"] = compress
        calls[name, "compress + residual"] = compress_residual
        calls[name, "decompress"] = decompress
        calls[name, "decompress, add"] = accumulate
    k = max(1, int(numel * top_k_share))
    indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
    calls[TOP_K, "select"] = lambda: _C.select_top_k(source, k, indices, values)
    calls[TOP_K, "select + residual"] = lambda: _C.select_top_k(source, k, indices, values, residual)
    return calls


def measure(
    calls: dict[tuple[str, str], Call], nbytes: int, rounds: int, seed: int, advance: Callable[[], None]
) -> np.ndarray:
    """Seconds per call, [call, round], in a random order each round. Calls `advance` after each round."""
    repeats = max(1, MEASURED_BYTES // nbytes)
    seconds = np.empty((len(calls), rounds))
    order = list(enumerate(calls.values()))
    generator = random.Random(seed)
    for index in range(-1, rounds):  # the first round warms up
        generator.shuffle(order)
        for row, call in order:
            call()  # warms the caches with this call's arrays, as far as they fit
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            seconds[row, max(index, 0)] = (time.perf_counter() - start) / repeats
        advance()
    return seconds
