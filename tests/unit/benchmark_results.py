"""Benchmark results from made-up times without noise."""

from typing import Any

import numpy as np

from torchddp.bench.step_time import step_time_result
from torchddp.harness.machine import describe_machine
from torchddp.harness.variants import make_variants

FIELD = make_variants("torchddp.DistributedDataParallel", [], (25,))
MODEL = {"model": "mlp", "title": "MLP", "parameters": 12, "gradient_bytes": 25_000_000}
ROUNDS = 10


def constant(*values_ms: float) -> np.ndarray:
    """Times [variant, round] without noise for no DDP, torch default, torch tuned and ours."""
    return np.array(values_ms)[:, None] + np.zeros((1, ROUNDS))


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def step_time() -> dict[str, Any]:
    return step_time_result(FIELD, {**MODEL, "step_ms": constant(10, 20, 16, 12)}, 2)


def document(*results: dict[str, Any], quick: bool = False) -> dict[str, Any]:
    head = {"date": "2030-01-02T03:04:05+00:00", "command": "torchddp bench", "machine": describe_machine()}
    return {**head, "settings": {"quick": quick}, "results": list(results)}
