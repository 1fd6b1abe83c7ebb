"""Short runs of `python -m benchmarks.sharded`, with torch's own variants, and of the case `training`."""

import json
import subprocess
import sys

import pytest

from benchmarks.training.methods import METHODS
from torchddp.harness.machine import ROOT

pytestmark = pytest.mark.thorough


def run(benchmark, *options):
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def run_sharded(path, variants, *options):
    """The variants' rows by name, and the whole result."""
    run("sharded", "--models", "mlp", "--variants", ",".join(variants), *options, "--json", str(path))
    (result,) = json.loads(path.read_text())["results"]
    rows = {row["name"]: row for row in result["variants"]}
    assert tuple(rows) == variants
    assert not any("left_out" in row for row in rows.values())
    return rows, result


def test_torchs_variants_train_alike_and_are_timed(tmp_path):
    variants = ("torch-ddp", "torch-ddp-fused", "torch-zero", "fsdp2")
    rows, result = run_sharded(tmp_path / "speed.json", variants, "--seconds", "2")
    assert result["rounds"] >= 7
    for row in rows.values():
        assert len(row["samples_ms"]) == result["rounds"] and min(row["samples_ms"]) > 0
        assert 0 <= row["training_error"] < 1e-3
    # The fused optimizer rounds differently, so an error above zero proves that training was compared.
    assert rows["torch-ddp-fused"]["training_error"] > 0


def test_sharded_state_is_a_share_of_the_whole(tmp_path):
    variants = ("torch-ddp", "torch-zero", "fsdp2")
    rows, result = run_sharded(tmp_path / "memory.json", variants, "--memory", "--ranks", "2")
    whole = result["gradient_bytes"]
    for name, key, share in (
        ("torch-ddp", "state_bytes", 2.0),
        ("torch-zero", "state_bytes", 1.0),
        ("torch-zero", "gradient_bytes", 1.0),
        ("fsdp2", "parameter_bytes", 0.5),
        ("fsdp2", "gradient_bytes", 0.5),
        ("fsdp2", "state_bytes", 1.0),
    ):
        assert rows[name]["largest"][key] == pytest.approx(share * whole, rel=0.01), (name, key)
    assert all(row["largest"]["peak_bytes"] > 0 and row["largest"]["pss_bytes"] > 0 for row in rows.values())


def test_a_short_run_trains_with_every_method(tmp_path):
    pytest.importorskip("sklearn")
    path = tmp_path / "run.json"
    command = [sys.executable, "-m", "benchmarks", "--case", "training", "--quick", "--set", "tasks=digits"]
    done = subprocess.run([*command, "--json", str(path), "--out", str(tmp_path)], cwd=ROOT, timeout=110)
    assert done.returncode == 0
    (result,) = json.loads(path.read_text())["results"]
    rows = {row["name"]: row for row in result["methods"]}
    assert tuple(rows) == tuple(METHODS)
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}
    # Ten classes: without learning the loss stays at 2.3.
    assert all(row["points"][0][2] > 2.2 and row["loss"] < 2.1 for row in rows.values())
    sent = {name: row["bytes_per_step"] for name, row in rows.items()}
    assert sent["exact"] == pytest.approx(4 * result["parameters"], rel=0.02)
    assert sent["int4"] < sent["int8"] < sent["bf16"] == sent["fp16"] < sent["exact"]
    assert all(abs(rows[name]["ratio"]["mean"] - 1) < 0.02 for name in ("fp16", "bf16"))
    (plot,) = tmp_path.glob("*-training-*.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
