"""From raw times of collectives to the numbers we quote. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchddp.bench.collective.names import GLOO, SHM
from torchddp.bench.collective.operations import (
    OPERATIONS,
    Operation,
    algbw_gb_per_s,
    busbw_gb_per_s,
    roofline_us,
)
from torchddp.harness.stats import paired_ratio, summarize


def _row(
    name: str, operation: Operation, size: dict[str, Any], world_size: int, least_us: float | None
) -> dict[str, Any]:
    time_us: np.ndarray = size["time_us"][size["names"].index(name)]
    gloo_us = size["time_us"][size["names"].index(GLOO)]
    summary = summarize(time_us)
    over_roofline = summary.median / least_us if least_us is not None and name == SHM else None
    return {
        "name": name,
        "time_us": summary.to_dict(),
        "algbw_gb_per_s": algbw_gb_per_s(size["bytes"], summary.median),
        "busbw_gb_per_s": busbw_gb_per_s(operation, size["bytes"], summary.median, world_size),
        "ratio_to_gloo": None if name == GLOO else paired_ratio(time_us, gloo_us).to_dict(),
        "over_roofline": over_roofline,
    }


def _size_result(operation: Operation, size: dict[str, Any], world_size: int) -> dict[str, Any]:
    memory_gb_per_s = size["memory_gb_per_s"]
    least_us = None if memory_gb_per_s is None else roofline_us(size["bytes"], world_size, memory_gb_per_s)
    return {
        "bytes": size["bytes"],
        "rounds": int(size["time_us"].shape[1]),
        "memory_gb_per_s": memory_gb_per_s,
        "roofline_us": least_us,
        "unavailable": size["unavailable"],
        "implementations": [_row(name, operation, size, world_size, least_us) for name in size["names"]],
    }


def collective_result(raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The result of one operation, ready for the table and for JSON."""
    operation = OPERATIONS[raw["operation"]]
    return {
        "case": "collective",
        "operation": operation.name,
        "world_size": world_size,
        "dtype": "float32",
        "unavailable": raw["unavailable"],
        "sizes": [_size_result(operation, size, world_size) for size in raw["sizes"]],
    }
