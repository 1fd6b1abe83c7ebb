"""`python -m benchmarks.links`: results for planned buckets and predictions, from made-up steps."""

from typing import Any

import numpy as np
import pytest

from benchmarks.links.field import LOCALHOST, PLANNED, make_field
from benchmarks.links.results import PAYLOAD_SHARE, place_result, predictions
from tests.simulated import make_profile, with_host
from tests.unit.benchmark_results import MODEL
from torchddp.plan.step_profile import LinearCost

MBIT, GBIT = 10**6, 10**9
VARIANTS = make_field((1, 25))


def result_of(place: str, step_ms: dict[str, float]) -> dict[str, Any]:
    """A result from steps without noise."""
    steps = np.array([[step_ms.get(variant.name, 50.0)] * 9 for variant in VARIANTS])
    raw = {**MODEL, "transport": "c10d", "planned_bytes": [], "profile": make_profile(), "step_ms": steps}
    return place_result(place, VARIANTS, raw)


def test_the_planned_buckets_are_last_and_not_part_of_the_sweep() -> None:
    assert VARIANTS[-1].name == PLANNED
    result = result_of("1 Gbit/s", {PLANNED: 40.0, "torchddp, cap 1": 44.0, "torch default": 80.0})
    assert result["best_of_sweep"] == "torchddp, cap 1"
    assert result["planned_to_best"]["median"] == pytest.approx(40 / 44)
    assert result["planned_to_torch_default"]["median"] == pytest.approx(0.5)
    assert result["ours_ms"] == 50.0


def test_each_link_is_predicted_from_the_others() -> None:
    profiles, results = {}, []
    for place, rate in (("1 Gbit/s", GBIT), ("100 Mbit/s", 100 * MBIT), (LOCALHOST, None)):
        profile = make_profile(device="cpu", cost=LinearCost(0.0, 1e-9 if rate is None else 8 / rate / PAYLOAD_SHARE))
        profiles[place, MODEL["model"]] = with_host(profile, 1e-10)
        results.append({**result_of(place, {}), "ours_ms": 100.0})
    rows = predictions(results, profiles, {"1 Gbit/s": GBIT, "100 Mbit/s": 100 * MBIT})
    ways = [("100 Mbit/s", "1 Gbit/s"), ("1 Gbit/s", "100 Mbit/s")]
    assert [(row["recorded_over"], row["predicted_for"]) for row in rows] == ways
    fast, slow = (row["predicted_ms"] for row in rows)
    assert slow > 5 * fast
    assert rows[0]["error"] == pytest.approx(fast / 100.0 - 1)
