"""Turns raw step times and memory into the numbers we quote. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.sharded.bounds import comparisons_of
from benchmarks.sharded.field import FIELD
from torchddp.bench.results import describe_variant
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.variants import Variant

SPEED_CASE, MEMORY_CASE = "sharded", "sharded_memory"
MODEL_KEYS = ("model", "title", "parameters", "gradient_bytes")
# The numbers per rank, in the order of the table.
MEMORY_KEYS = (
    "parameter_bytes",
    "gradient_bytes",
    "bucket_bytes",
    "state_bytes",
    "pss_bytes",
    "shared_bytes",
    "peak_bytes",
)


def speed_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """One model: each variant's step times with samples, and each possible comparison."""
    step_ms, left_out = raw["step_ms"], raw["left_out"]
    rows = []
    for variant in variants:
        row = {**describe_variant(variant), "what": FIELD[variant.name].what}
        if variant.name in left_out:
            row["left_out"] = left_out[variant.name]
        else:
            samples = step_ms[variant.name]
            row["step_ms"] = summarize(samples).to_dict()
            row["samples_ms"] = [round(float(sample), 4) for sample in samples]
            row["training_error"] = raw["training_errors"][variant.name]
        rows.append(row)
    medians = {row["name"]: row["step_ms"]["median"] for row in rows if "step_ms" in row}
    comparisons = []
    for comparison in comparisons_of(medians):
        opponent = comparison.fastest(medians)
        assert opponent is not None
        comparisons.append(
            {
                "ours": comparison.ours,
                "against": comparison.against,
                "opponent": opponent,
                "bound": comparison.bound,
                "reason": comparison.reason,
                "ratio": paired_ratio(step_ms[comparison.ours], step_ms[opponent]).to_dict(),
            }
        )
    return {
        "case": SPEED_CASE,
        **{key: raw[key] for key in MODEL_KEYS},
        "world_size": world_size,
        "unit": "ms",
        "rounds": len(next(iter(step_ms.values()))),
        "variants": rows,
        "comparisons": comparisons,
    }


def memory_result(variants: Sequence[Variant], raws: Sequence[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """One model: the maximum over ranks by kind of memory, and every rank's numbers."""
    rows = []
    for variant, raw in zip(variants, raws, strict=True):
        row = {**describe_variant(variant), "what": FIELD[variant.name].what}
        if raw["left_out"]:
            row["left_out"] = raw["left_out"]
        else:
            row["ranks"] = raw["ranks"]
            row["largest"] = {key: _largest([rank[key] for rank in raw["ranks"]]) for key in MEMORY_KEYS}
        rows.append(row)
    return {
        "case": MEMORY_CASE,
        **{key: raws[0][key] for key in MODEL_KEYS},
        "world_size": world_size,
        "variants": rows,
    }


def _largest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None
