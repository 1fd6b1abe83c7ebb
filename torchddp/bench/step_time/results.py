"""From the times of steps to the numbers we quote. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchddp.bench.results import best_torch, describe_variant
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.variants import Variant


def compared_rows(variants: Sequence[Variant], times_ms: np.ndarray) -> tuple[str, list[dict[str, Any]]]:
    """The name of torch's fastest row, and a row per variant: its time, and its ratio to torch's fastest by round."""
    summaries = [summarize(row) for row in times_ms]
    best = best_torch(variants, [summary.median for summary in summaries])
    rows = [
        {
            **describe_variant(variant),
            "step_ms": summaries[index].to_dict(),
            "ratio_to_best_torch": None if index == best else paired_ratio(times_ms[index], times_ms[best]).to_dict(),
        }
        for index, variant in enumerate(variants)
    ]
    return variants[best].name, rows


def step_time_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The result of one model, ready for the table and for JSON."""
    step_ms = raw["step_ms"]
    best, rows = compared_rows(variants, step_ms)
    return {
        "case": "step_time",
        **{key: raw[key] for key in ("model", "title", "parameters", "gradient_bytes")},
        "world_size": world_size,
        "unit": "ms",
        "rounds": int(step_ms.shape[1]),
        "best_torch": best,
        "variants": rows,
    }
