"""`python -m benchmarks.checks`: what is said of made-up times, and a run of it."""

import json

import numpy as np
import pytest

from benchmarks.checks import cli
from benchmarks.checks.field import make_field
from benchmarks.checks.results import model_result


def made_up(checked_ms: float = 14.0) -> dict:
    step_ms = np.array([[8.0] * 3, [10.0] * 3, [10.0] * 3, [checked_ms] * 3, [10.1] * 3, [11.0] * 3, *[[10.0] * 3] * 2])
    raw = {"model": "mlp", "title": "MLP", "parameters": 12, "gradient_bytes": 10**6, "step_ms": step_ms}
    return model_result(raw, make_field(), 2, 100)


def test_a_check_costs_its_part_of_each_step() -> None:
    result = made_up()
    assert result["check_ms"]["median"] == pytest.approx(4.0)
    assert result["check_share"] == pytest.approx(0.004)
    ratios = {row["name"]: row["to_plain"] for row in result["variants"]}
    assert ratios["no DDP"] is None and ratios["plain"] is None
    assert ratios["find_nonfinite=True"]["median"] == pytest.approx(1.01)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "checks.json"
    assert cli.main(["--model", "small", "--seconds", "0.5", "--json", str(path)]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert result["model"] == "small" and len(result["variants"]) == len(make_field())
    assert all(row["step_ms"]["median"] > 0 for row in result["variants"])
