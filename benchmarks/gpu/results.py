"""From raw times to the numbers we quote. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.cases import MODELS_CASE
from torchddp.bench.gradients import timed_result
from torchddp.harness.stats import summarize
from torchddp.harness.variants import Variant


def model_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """One model: steps, costs and ratios by the device's clock; the host's time; the device's work per step."""
    result = timed_result(MODELS_CASE, variants, raw, world_size)
    rows = zip(result["variants"], raw["host_ms"], raw["work"], raw["transports"], strict=True)
    for row, host_ms, work, transport in rows:
        row["host_ms"] = summarize(host_ms).to_dict()
        row["work_per_step"] = work
        row["transport"] = transport
    return result
