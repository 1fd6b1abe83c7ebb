"""`python -m benchmarks.compress`: what is timed, and what is said of made-up times."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compress import cli
from benchmarks.compress.measure import COPY, FORMATS
from benchmarks.compress.results import size_result

NAMES = [(COPY, ""), ("int8", "compress"), ("int8", "decompress")]


def test_speeds_are_of_the_fp32_side_and_ratios_of_one_round() -> None:
    seconds = np.array([[1e-3, 2e-3, 1e-3], [2e-3, 8e-3, 2e-3], [5e-4, 1e-3, 5e-4]])
    result = size_result(4_000_000, NAMES, seconds)
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
