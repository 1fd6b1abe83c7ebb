"""Turns the times of one collective into results for the table and for JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchddp.bench.collective.implementations import GLOO, OURS, SHM
from torchddp.bench.collective.operations import OPERATIONS, Operation, algbw_gb_per_s, busbw_gb_per_s, roofline_us
from torchddp.harness.stats import paired_ratio, summarize


def best_peer(medians_us: dict[str, float]) -> str:
    """The fastest that is not ours. It is chosen by the numbers that are then reported, which favors it."""
    return min((name for name in medians_us if name not in OURS), key=medians_us.__getitem__)


def _size_result(operation: Operation, size: dict[str, Any], world_size: int) -> dict[str, Any]:
    memory_gb_per_s = size["memory_gb_per_s"]
    least_us = None if memory_gb_per_s is None else roofline_us(size["bytes"], world_size, memory_gb_per_s)
    times_us: dict[str, np.ndarray] = dict(zip(size["names"], size["time_us"], strict=True))
    slowest_us: dict[str, np.ndarray] = dict(zip(size["names"], size["slowest_us"], strict=True))
    summaries = {name: summarize(time_us) for name, time_us in times_us.items()}
    best = best_peer({name: summary.median for name, summary in summaries.items()})
    rows = [
        {
            "name": name,
            "time_us": summary.to_dict(),
            "slowest_rank_us": summarize(slowest_us[name]).to_dict(),
            "algbw_gb_per_s": algbw_gb_per_s(size["bytes"], summary.median),
            "busbw_gb_per_s": busbw_gb_per_s(operation, size["bytes"], summary.median, world_size),
            "ratio_to_gloo": None if name == GLOO else paired_ratio(times_us[name], times_us[GLOO]).to_dict(),
            "best_peer_ratio": paired_ratio(times_us[name], times_us[best]).to_dict() if name in OURS else None,
            "over_roofline": summary.median / least_us if least_us is not None and name == SHM else None,
        }
        for name, summary in summaries.items()
    ]
    return {
        "bytes": size["bytes"],
        "rounds": int(size["time_us"].shape[1]),
        "memory_gb_per_s": memory_gb_per_s,
        "roofline_us": least_us,
        "best_peer": best,
        "unavailable": size["unavailable"],
        "implementations": rows,
    }


def collective_result(raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    operation = OPERATIONS[raw["operation"]]
    return {
        "case": "collective",
        "operation": operation.name,
        "world_size": world_size,
        "dtype": "float32",
        **{key: raw[key] for key in ("peers", "processors", "unavailable", "remarks")},
        "sizes": [_size_result(operation, size, world_size) for size in raw["sizes"]],
    }
