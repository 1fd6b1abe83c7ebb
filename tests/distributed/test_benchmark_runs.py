"""Short runs of the cases `sharded`, with torch's own variants, and `training`, also with a method that fails."""

import json

import pytest
import torch.distributed as dist

from benchmarks.training.methods import METHODS
from benchmarks.training.race import racers_of
from benchmarks.training.tasks import gpt_for_one_host, shortened
from tests.harness import on_ranks
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
def test_sharded_state_is_a_share_of_the_whole(tmp_path):
    result = result_of(tmp_path, "sharded_memory", "--set", "variants=torch-zero,fsdp2")
    rows = {row["name"]: row for row in result["variants"]}
    whole = result["gradient_bytes"]
    for name, key, share in (
        ("torch-ddp", "state_bytes", 2.0),
        ("torch-zero", "state_bytes", 1.0),
        ("torch-zero", "gradient_bytes", 1.0),
        ("fsdp2", "parameter_bytes", 0.5),
        ("fsdp2", "gradient_bytes", 0.5),
        ("fsdp2", "state_bytes", 1.0),
    ):
        assert rows[name][key] == pytest.approx(share * whole, rel=0.01), (name, key)
    assert all(row["peak_bytes"] > 0 and row["pss_bytes"] > 0 for row in rows.values())


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


def fails_on_rank_one(replica):
    if dist.get_rank() == 1:
        raise ValueError("no such luck\nand more")


@on_ranks(2)
def test_a_method_that_fails_on_one_rank_is_dropped_on_all(rank):
    small = shortened(gpt_for_one_host(), 6)
    names = ("torch-ddp", "torch-powersgd", "nothing")
    with racers_of(names, small, 0, 20.0, over_link=False) as (unlucky, other, unknown):
        assert other.points[0].loss == unlucky.points[0].loss
        unlucky.try_to(fails_on_rank_one)
        assert unlucky.problem == "rank 1: ValueError: no such luck"
        # It stays dropped, and no rank waits for it.
        unlucky.advance()
        assert unlucky.result() == {"error": "rank 1: ValueError: no such luck"} and len(unlucky.points) == 1
        other.advance()
        assert other.points[1].steps == small.slice_steps and other.points[1].loss < other.points[0].loss
        # A method that cannot be built is dropped with the reason.
        assert unknown.problem == "KeyError: 'nothing'"
