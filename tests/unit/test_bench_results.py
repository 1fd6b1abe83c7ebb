"""Results of benchmarks.checks and benchmarks.compress from made-up times, and a run of the latter."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checks.field import make_field
from benchmarks.checks.results import model_result
from benchmarks.compress import cli
from benchmarks.compress.measure import COPY, FORMATS
from benchmarks.compress.results import size_result


def test_a_check_costs_its_share_of_each_step() -> None:
    step_ms = np.array([[8.0] * 3, [10.0] * 3, [10.0] * 3, [14.0] * 3, [10.1] * 3, [11.0] * 3, *[[10.0] * 3] * 2])
    raw = {"model": "mlp", "title": "MLP", "parameters": 12, "gradient_bytes": 10**6, "step_ms": step_ms}
    result = model_result(raw, make_field(), 2, 100)
    assert result["check_ms"]["median"] == pytest.approx(4.0)
    assert result["check_share"] == pytest.approx(0.004)
    ratios = {row["name"]: row["to_plain"] for row in result["variants"]}
    assert ratios["no DDP"] is None and ratios["plain"] is None
    assert ratios["find_nonfinite=True"]["median"] == pytest.approx(1.01)


def test_speeds_are_of_the_fp32_side_and_ratios_of_one_round() -> None:
    seconds = np.array([[1e-3, 2e-3, 1e-3], [2e-3, 8e-3, 2e-3], [5e-4, 1e-3, 5e-4]])
    names = [(COPY, ""), ("int8", "compress"), ("int8", "decompress")]
    result = size_result(4_000_000, names, seconds)
    copy, slow, fast = result["kernels"]
    assert copy["gb_per_s"]["median"] == pytest.approx(4.0)
    assert copy["to_memcpy"] is None
    assert slow["to_memcpy"]["median"] == pytest.approx(0.5)
    assert slow["gb_per_s"]["median"] == pytest.approx(2.0)
    assert fast["to_memcpy"]["q25"] == pytest.approx(2.0)


def test_the_command_times_every_kernel_and_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "compress.json"
    assert cli.main(["--kib", "4", "--rounds", "1", "--output", str(path)]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert result["nbytes"] == 4096
    kernels = [kernel["what"] for kernel in result["kernels"]]
    assert kernels == [COPY, *(name for name in FORMATS for _ in range(4)), *["top-k"] * 2]
    assert all(kernel["gb_per_s"]["median"] > 0 for kernel in result["kernels"])
