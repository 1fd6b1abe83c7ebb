"""The benchmark over links of several rates, on real namespaces: one short run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.links.field import PLANNED
from torchddp.harness.machine import ROOT

pytestmark = pytest.mark.usefixtures("two_namespaces")


@pytest.mark.thorough
def test_a_short_run_measures_plans_and_predicts(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    rates = ["--rate", "1gbit", "--rate", "500mbit", "--no-one-host"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.links", *rates, "--model", "conv", "--caps", "25", "--seconds", "0.2"]
        + ["--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert [result["place"] for result in document["results"]] == ["1 Gbit/s", "500 Mbit/s"]
    for result in document["results"]:
        # 4.7 MB take 38 ms at 1 Gbit/s.
        planned = next(row for row in result["variants"] if row["name"] == PLANNED)
        assert result["transport"] == "c10d" and planned["step_ms"]["median"] > 30
    rows = document["predictions"]
    assert {(row["recorded_over"], row["predicted_for"]) for row in rows} == {
        ("1 Gbit/s", "500 Mbit/s"),
        ("500 Mbit/s", "1 Gbit/s"),
    }
    assert all(abs(row["error"]) < 1 for row in rows)
