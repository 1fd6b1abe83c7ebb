"""Short runs of the cases `sharded`, with torch's own variants, and `training`, also with a method that fails."""

import json

import pytest

from benchmarks.training.methods import METHODS
from tests.programs import ROOT, python


def result_of(folder, case, *options):
    """The only result of a short run, which must also draw a plot."""
    written = "--json", str(folder / "run.json"), "--out", str(folder)
    done = python("-m", "benchmarks", "--case", case, "--quick", *options, *written, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (plot,) = folder.glob(f"*-{case}-*.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    (result,) = json.loads((folder / "run.json").read_text())["results"]
    return result


@pytest.mark.thorough
def test_torchs_variants_train_alike_and_are_timed(tmp_path):
    variants = ["torch-ddp", "torch-ddp-fused", "torch-zero", "fsdp2"]
    result = result_of(tmp_path, "sharded", "--set", f"variants={','.join(variants)}")
    assert [row["name"] for row in result["variants"]] == variants
    assert result["rounds"] >= 7 and all(row["step_ms"]["median"] > 0 for row in result["variants"])


@pytest.mark.thorough
def test_a_short_run_trains_with_every_method(tmp_path):
    pytest.importorskip("sklearn")
    result = result_of(tmp_path, "training", "--set", "tasks=digits")
    rows = {row["name"]: row for row in result["methods"]}
    assert tuple(rows) == tuple(METHODS)
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}
    # Ten classes: without learning the loss stays at 2.3.
    assert all(row["points"][0][2] > 2.2 and row["loss"] < 2.1 for row in rows.values())
    sent = {name: row["bytes_per_step"] for name, row in rows.items()}
    assert sent["exact"] == pytest.approx(4 * result["parameters"], rel=0.02)
    assert sent["int4"] < sent["int8"] < sent["bf16"] == sent["fp16"] < sent["exact"]
    assert all(abs(rows[name]["ratio"]["mean"] - 1) < 0.02 for name in ("fp16", "bf16"))
