"""From raw step times to what was hidden. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchddp.bench.results import added_ms, describe_variant
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.variants import Role, Variant


def hidden_share(exposed_ms: np.ndarray, comm_ms: np.ndarray) -> dict[str, Any]:
    """1 - exposed/comm, round by round; below 0 and above 1 where noise, or the machine, made it so."""
    ratio = paired_ratio(exposed_ms, comm_ms).to_dict()

    def rest(key: str) -> float | None:
        value = ratio[key]
        return None if value is None else 1 - value

    return {
        "median": rest("median"),
        "q25": rest("q75"),
        "q75": rest("q25"),
        "ci95_low": rest("ci95_high"),
        "ci95_high": rest("ci95_low"),
        "of_medians": rest("of_medians"),
        "rounds": ratio["rounds"],
        "odd_rounds": ratio["odd_rounds"],
    }


def overlap_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The result of one model, ready for the table and for JSON."""
    step_ms, replay_ms = raw["step_ms"], raw["replay_ms"]
    exposed_ms, comm_ms = added_ms(variants, step_ms), added_ms(variants, replay_ms)
    rows = []
    for index, variant in enumerate(variants):
        row = {
            **describe_variant(variant),
            "step_ms": summarize(step_ms[index]).to_dict(),
            "replay_ms": summarize(replay_ms[index]).to_dict(),
        }
        if variant.role is not Role.LOCAL:
            row["exposed_ms"] = summarize(exposed_ms[index]).to_dict()
            row["comm_ms"] = summarize(comm_ms[index]).to_dict()
            row["hidden"] = hidden_share(exposed_ms[index], comm_ms[index])
        rows.append(row)
    return {
        "case": "overlap",
        **{key: raw[key] for key in ("model", "title", "parameters", "gradient_bytes")},
        "world_size": world_size,
        "unit": "ms",
        "rounds": int(step_ms.shape[1]),
        "variants": rows,
    }
