"""`python -m benchmarks.convergence`: one short run, of the digits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.convergence.bounds import NAMES
from torchddp.harness.machine import ROOT


@pytest.mark.thorough
def test_a_short_run_trains_by_every_method(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path, plot = tmp_path / "run.json", tmp_path / "run.png"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.convergence", "--quick", "--task", "digits", "--seeds", "1"]
        + ["--output", str(path), "--plot", str(plot)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text())["results"]
    rows = {row["name"]: row for row in result["methods"]}
    assert tuple(rows) == NAMES
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}
    # Ten classes: whoever learns nothing stays at 2.3.
    assert all(row["curve"][0]["loss"] > 2.2 and row["loss"] < 2.1 for row in rows.values())
    sent = {name: row["bytes_per_step"] for name, row in rows.items()}
    assert sent["uncompressed"] == pytest.approx(4 * result["parameters"], rel=0.02)
    assert sent["topk"] < sent["int4"] < sent["int8"] < sent["bf16"] == sent["fp16"] < sent["uncompressed"]
    assert all(abs(rows[name]["ratio"]["mean"] - 1) < 0.02 for name in ("fp16", "bf16"))
    assert plot.read_bytes().startswith(b"\x89PNG")
