"""`python -m benchmarks.checks`: what is said of made-up times."""

import numpy as np
import pytest

from benchmarks.checks.field import make_field
from benchmarks.checks.results import model_result


def test_a_check_costs_its_part_of_each_step() -> None:
    step_ms = np.array([[8.0] * 3, [10.0] * 3, [10.0] * 3, [14.0] * 3, [10.1] * 3, [11.0] * 3, *[[10.0] * 3] * 2])
    raw = {"model": "mlp", "title": "MLP", "parameters": 12, "gradient_bytes": 10**6, "step_ms": step_ms}
    result = model_result(raw, make_field(), 2, 100)
    assert result["check_ms"]["median"] == pytest.approx(4.0)
    assert result["check_share"] == pytest.approx(0.004)
    ratios = {row["name"]: row["to_plain"] for row in result["variants"]}
    assert ratios["no DDP"] is None and ratios["plain"] is None
    assert ratios["find_nonfinite=True"]["median"] == pytest.approx(1.01)
