"""Turns raw step times into ratios: planned buckets to the best of the sweep, predictions to measurements. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.links.field import LOCALHOST, OUR_DEFAULT, PLANNED, TORCH_DEFAULT
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.variants import Variant
from torchddp.plan.step_profile import StepProfile
from torchddp.simulate.network import Link
from torchddp.simulate.predict import predict

# Of each 1514 bytes on a shaped link, 1448 are payload: the limit counts Ethernet headers, but neither the preamble nor
# the gap.
PAYLOAD_SHARE = 1448 / 1514


def place_result(place: str, variants: Sequence[Variant], raw: dict[str, Any]) -> dict[str, Any]:
    """One model over one link. The best of the sweep is chosen by the same samples that are reported for it."""
    step_ms = raw["step_ms"]
    names = [variant.name for variant in variants]
    planned, torch_default, ours = (names.index(name) for name in (PLANNED, TORCH_DEFAULT, OUR_DEFAULT))
    swept = [i for i, v in enumerate(variants) if "bucket_cap_mb" in v.keywords and i != planned]
    best = min(swept, key=lambda index: float(np.median(step_ms[index])))
    return {
        "case": "links",
        "place": place,
        "model": raw["model"],
        "title": raw["title"],
        "parameters": raw["parameters"],
        "gradient_bytes": raw["gradient_bytes"],
        "world_size": 2,
        "transport": raw["transport"],
        "rounds": int(step_ms.shape[1]),
        "planned_bytes": raw["planned_bytes"],
        "best_of_sweep": names[best],
        "planned_to_best": paired_ratio(step_ms[planned], step_ms[best]).to_dict(),
        "planned_to_torch_default": paired_ratio(step_ms[planned], step_ms[torch_default]).to_dict(),
        "ours_ms": float(np.median(step_ms[ours])),
        "variants": [
            {"name": variant.name, "role": variant.role.value, "step_ms": summarize(step_ms[index]).to_dict()}
            for index, variant in enumerate(variants)
        ],
        "profile": raw["profile"].to_dict(),
    }


def predictions(
    results: Sequence[dict[str, Any]], profiles: Mapping[tuple[str, str], StepProfile], rates: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Predicts every link from the profile of every other; `profiles` by (place, model), `rates` by place in bit/s."""
    found = []
    for result in results:
        rate = rates.get(result["place"])
        for (place, model), profile in profiles.items():
            if rate is None or model != result["model"] or place in (result["place"], LOCALHOST):
                continue
            link = Link(result["place"], result["place"], rate / 8 * PAYLOAD_SHARE, None)
            predicted_ms = 1e3 * predict(profile, link, 2).step_s
            found.append(
                {
                    "model": model,
                    "recorded_over": place,
                    "predicted_for": result["place"],
                    "predicted_ms": predicted_ms,
                    "measured_ms": result["ours_ms"],
                    "error": predicted_ms / result["ours_ms"] - 1,
                }
            )
    return found
