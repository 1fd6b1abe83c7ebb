"""The benchmark of sharding, one short run of each part with what torch itself brings."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchddp.harness.machine import ROOT


def run(path: Path, variants: tuple[str, ...], *options: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.sharded", "--models", "mlp", "--variants", ",".join(variants)]
    done = subprocess.run(
        [*command, *options, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text())["results"]
    assert tuple(row["name"] for row in result["variants"]) == variants
    assert not any("left_out" in row for row in result["variants"])
    return result


@pytest.mark.thorough
def test_torchs_variants_train_alike_and_are_timed(tmp_path: Path) -> None:
    result = run(tmp_path / "speed.json", ("torch-ddp", "torch-ddp-fused", "torch-zero", "fsdp2"), "--seconds", "2")
    assert result["rounds"] >= 7
    for row in result["variants"]:
        assert len(row["samples_ms"]) == result["rounds"] and min(row["samples_ms"]) > 0
        assert 0 <= row["training_error"] < 1e-3
    # Rounding differs in the fused optimizer: its training was really compared.
    assert next(row for row in result["variants"] if row["name"] == "torch-ddp-fused")["training_error"] > 0


@pytest.mark.thorough
def test_sharded_state_is_a_share_of_the_whole(tmp_path: Path) -> None:
    result = run(tmp_path / "memory.json", ("torch-ddp", "torch-zero", "fsdp2"), "--memory", "--ranks", "2")
    held = {row["name"]: row["largest"] for row in result["variants"]}
    whole = result["gradient_bytes"]
    assert held["torch-ddp"]["state_bytes"] == pytest.approx(2 * whole, rel=1e-3)
    assert held["torch-zero"]["state_bytes"] == pytest.approx(whole, rel=1e-3)
    assert held["torch-zero"]["gradient_bytes"] == pytest.approx(whole, rel=1e-3)
    for key, share in (("parameter_bytes", 0.5), ("gradient_bytes", 0.5), ("state_bytes", 1.0)):
        assert held["fsdp2"][key] == pytest.approx(share * whole, rel=0.01), key
    for row in held.values():
        assert row["peak_bytes"] > 0 and row["pss_bytes"] > 0
