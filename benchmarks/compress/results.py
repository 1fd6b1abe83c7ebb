"""Turns raw seconds into results: fp32 bytes per second, and the ratio to a copy of the same bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchddp.harness.stats import paired_ratio, summarize


def size_result(nbytes: int, names: Sequence[tuple[str, str]], seconds: np.ndarray) -> dict[str, Any]:
    """One size; `seconds` is [call, round], the copy first. A ratio above 1 means faster than the copy."""
    return {
        "case": "compress",
        "nbytes": nbytes,
        "rounds": int(seconds.shape[1]),
        "kernels": [
            {
                "what": what,
                "how": how,
                "gb_per_s": summarize(nbytes / seconds[row] / 1e9).to_dict(),
                "to_memcpy": None if row == 0 else paired_ratio(seconds[0], seconds[row]).to_dict(),
            }
            for row, (what, how) in enumerate(names)
        ],
    }
