"""Turns raw step times into the numbers we quote, and selects the variants. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.two_hosts.network import RANKS_PER_HOST
from torchddp.bench.cases import Case
from torchddp.bench.gradients import timed_result
from torchddp.bench.results import best_torch
from torchddp.harness.stats import paired_ratio
from torchddp.harness.variants import Role, Variant

CASE = Case(
    name="two_hosts",
    title="step over two hosts and a slow link",
    models=("small", "mlp", "gpt", "conv"),
    quick_models=("mlp", "conv"),
    default_world_size=2 * RANKS_PER_HOST,
    unit="ms",
    # Ratio of whole steps: the slow link need only carry two thirds of what a ring over all ranks sends.
    goal_ratio=0.75,
)
AUTO = "auto"


def with_transport(variants: Sequence[Variant], transport: str) -> tuple[Variant, ...]:
    """The variants with another transport for the class under test; `AUTO` leaves its default."""
    if transport == AUTO:
        return tuple(variants)
    return tuple(
        replace(
            variant,
            name=f"{variant.name.removesuffix(' default')}, {transport}",
            options=(*variant.options, ("transport", transport)),
        )
        if variant.role is Role.OURS
        else variant
        for variant in variants
    )


def two_hosts_result(variants: Sequence[Variant], raw: dict[str, Any]) -> dict[str, Any]:
    """The result of one model, like any timed case, but with ratios of whole steps and the bytes sent."""
    result = timed_result(CASE, variants, raw, CASE.default_world_size)
    step_ms = raw["step_ms"]
    best = best_torch(variants, [float(np.median(row)) for row in step_ms])
    for index, row in enumerate(result["variants"]):
        row["sent_bytes"] = [by_variant[index] for by_variant in raw["sent_bytes"]]
        if variants[index].role is not Role.LOCAL:
            ratio = None if index == best else paired_ratio(step_ms[index], step_ms[best]).to_dict()
            row["ratio_to_best_torch"] = ratio
    return {**result, "best_torch": variants[best].name, "ratio_of": "step", "transport": raw["transport"]}
