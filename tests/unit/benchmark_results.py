"""Benchmark results from made-up times without noise."""

from typing import Any

import numpy as np

from torchddp.bench.overlap import overlap_result
from torchddp.bench.scaling import scaling_result
from torchddp.bench.startup import startup_result
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


def overlap() -> dict[str, Any]:
    raw = {**MODEL, "step_ms": constant(10, 14, 12, 10.5), "replay_ms": constant(1, 6, 9, 3)}
    return overlap_result(FIELD, raw, 2)


def startup() -> dict[str, Any]:
    clocks = [constant(0, 30, 40, 5), constant(5, 20, 10, 10), constant(5, 10, 10, 5)]
    return startup_result(FIELD, {**MODEL, "times_ms": np.stack(clocks)}, 2)


def scaling() -> dict[str, Any]:
    raws = {2: constant(10, 20, 15, 12), 4: constant(20, 50, 40, 24), 1: constant(10, 12, 12, 10)}
    return scaling_result(FIELD, {n: {**MODEL, "step_ms": steps} for n, steps in raws.items()}, cores=2)


def document(*results: dict[str, Any], quick: bool = False) -> dict[str, Any]:
    head = {"date": "2030-01-02T03:04:05+00:00", "command": "torchddp bench", "machine": describe_machine()}
    return {**head, "settings": {"quick": quick}, "results": list(results)}
