"""Turns raw step times into results: the ratio of each variant to the plain step of its round. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.checks.field import CHECKED, PLAIN
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.variants import Role, Variant


def model_result(raw: dict[str, Any], variants: Sequence[Variant], world_size: int, every: int) -> dict[str, Any]:
    """One model; ``raw["step_ms"]`` is [variant, round]. Per step, a check costs 1/`every` of its time."""
    step_ms = raw["step_ms"]
    names = [variant.name for variant in variants]
    plain, checked = step_ms[names.index(PLAIN)], step_ms[names.index(CHECKED)]
    check_ms = summarize(checked - plain)
    return {
        "case": "checks",
        "model": raw["model"],
        "title": raw["title"],
        "parameters": raw["parameters"],
        "gradient_bytes": raw["gradient_bytes"],
        "world_size": world_size,
        "rounds": int(step_ms.shape[1]),
        "every": every,
        "check_ms": check_ms.to_dict(),
        "check_share": check_ms.median / every / float(np.median(plain)),
        "variants": [
            {
                "name": variant.name,
                "role": variant.role.value,
                "step_ms": summarize(step_ms[row]).to_dict(),
                "to_plain": None
                if variant.role is Role.LOCAL or variant.name == PLAIN
                else paired_ratio(step_ms[row], plain).to_dict(),
            }
            for row, variant in enumerate(variants)
        ],
    }
