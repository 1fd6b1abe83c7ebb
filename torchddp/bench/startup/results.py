"""From raw times to the numbers we quote. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchddp.bench.results import best_torch, describe_variant
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.variants import Variant

CLOCKS = ("constructor_ms", "first_step_ms", "second_step_ms")


def startup_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The result of one model; `total_ms` is the sum of the three, round by round, and what the ratio is of."""
    times_ms = raw["times_ms"]  # [clock, variant, round]
    total_ms = times_ms.sum(axis=0)
    totals = [summarize(row) for row in total_ms]
    best = best_torch(variants, [total.median for total in totals])
    rows = []
    for index, variant in enumerate(variants):
        ratio = None if index == best else paired_ratio(total_ms[index], total_ms[best]).to_dict()
        rows.append(
            {
                **describe_variant(variant),
                **{name: summarize(times_ms[clock][index]).to_dict() for clock, name in enumerate(CLOCKS)},
                "total_ms": totals[index].to_dict(),
                "ratio_to_best_torch": ratio,
            }
        )
    return {
        "case": "startup",
        **{key: raw[key] for key in ("model", "title", "parameters", "gradient_bytes")},
        "world_size": world_size,
        "unit": "ms",
        "rounds": int(times_ms.shape[2]),
        "best_torch": variants[best].name,
        "variants": rows,
    }
