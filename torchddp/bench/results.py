"""From raw step times to the numbers we quote. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchddp.bench.cases import Case
from torchddp.harness.stats import paired_ratio, running_median, summarize
from torchddp.harness.variants import Role, Variant

# Rounds on either side whose local steps count too: near enough to follow the machine's drift, and enough of them that
# the noise of one local step does not end up in every cost of its round.
LOCAL_HALF_WINDOW = 4


def describe_variant(variant: Variant) -> dict[str, Any]:
    """What a row says about its variant."""
    return {
        "name": variant.name,
        "role": variant.role.value,
        "class": variant.class_path,
        "options": variant.keywords,
    }


def added_ms(variants: Sequence[Variant], step_ms: np.ndarray) -> np.ndarray:
    """[variant, round] of what each wrapper adds to the local step around its round, in ms."""
    local = next(index for index, variant in enumerate(variants) if variant.role is Role.LOCAL)
    added: np.ndarray = step_ms - running_median(step_ms[local], LOCAL_HALF_WINDOW)
    return added


def costs(case: Case, variants: Sequence[Variant], step_ms: np.ndarray, parameters: int) -> np.ndarray:
    """[variant, round] of what each wrapper adds to the local step around its round, in the case's unit."""
    added = added_ms(variants, step_ms)
    return added * 1000.0 / parameters if case.name == "per_param" else added


def best_torch(variants: Sequence[Variant], medians: Sequence[float]) -> int:
    """The index of torch's fastest row. Chosen by the very numbers it is quoted with, which favours torch."""
    candidates = [index for index, variant in enumerate(variants) if variant.role is Role.TORCH]
    return min(candidates, key=lambda index: medians[index])


def timed_result(case: Case, variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The result of one model of a timed case, ready for the table and for JSON."""
    step_ms = raw["step_ms"]
    cost = costs(case, variants, step_ms, raw["parameters"])
    summaries = [summarize(row) for row in cost]
    best = best_torch(variants, [summary.median for summary in summaries])
    rows = []
    for index, variant in enumerate(variants):
        row = {**describe_variant(variant), "step_ms": summarize(step_ms[index]).to_dict()}
        if variant.role is not Role.LOCAL:
            row["cost"] = summaries[index].to_dict()
            row["ratio_to_best_torch"] = None if index == best else paired_ratio(cost[index], cost[best]).to_dict()
        rows.append(row)
    return {
        "case": case.name,
        "model": raw["model"],
        "title": raw["title"],
        "parameters": raw["parameters"],
        "gradient_bytes": raw["gradient_bytes"],
        "world_size": world_size,
        "unit": case.unit,
        "rounds": int(step_ms.shape[1]),
        "best_torch": variants[best].name,
        # Set for the models of the case, not for any model.
        "goal_ratio": case.goal_ratio if raw["model"] in case.models else None,
        "variants": rows,
    }


def memory_result(variants: Sequence[Variant], raws: Sequence[dict[str, Any]], world_size: int) -> dict[str, Any]:
    """The result of one model of the memory case: peaks, and what each wrapper holds beyond the bare model."""
    local = next(raw for variant, raw in zip(variants, raws, strict=True) if variant.role is Role.LOCAL)
    rows = []
    for variant, raw in zip(variants, raws, strict=True):
        extra_bytes = raw["peak_rss_bytes"] - local["peak_rss_bytes"]
        rows.append(
            {
                **describe_variant(variant),
                "peak_rss_bytes": raw["peak_rss_bytes"],
                "grad_storage_bytes": raw["grad_storage_bytes"],
                "extra_bytes": extra_bytes,
                # 1.0 means: a whole second copy of the gradients.
                "extra_gradient_copies": extra_bytes / local["gradient_bytes"],
            }
        )
    return {
        "case": "memory",
        "model": local["model"],
        "title": local["title"],
        "parameters": local["parameters"],
        "gradient_bytes": local["gradient_bytes"],
        "world_size": world_size,
        "method": local["method"],
        "variants": rows,
    }
