"""The GPT example on two ranks: resuming, probing and accumulating don't change losses; bad input ends all ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.gpt.config import TrainConfig
from examples.gpt.errors import ExampleError
from examples.gpt.ranks import Ranks
from examples.train_gpt import train_on
from tests.harness import is_own_class, run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
TEXT = b"the quick brown fox jumps over the lazy dog. " * 60
DDP = "torchddp" if is_own_class() else "torch"
SMALL = {
    "steps": 8,
    "batch_size": 2,
    "block_size": 16,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "warmup_steps": 2,
    "eval_interval": 4,
    "eval_batches": 2,
    "dropout": 0.1,  # makes a resumed run need the ranks' random states
    "device": "cpu",
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    return path


def _train(rank, world_size, options):
    ranks = Ranks(rank, rank, world_size, torch.device("cpu"), has_group=True)
    return train_on(TrainConfig(**{**SMALL, "ddp": DDP, **options}), ranks)


def _refused(rank, world_size, options):
    """The error with which this rank's run is refused."""
    with pytest.raises(ExampleError) as caught:
        _train(rank, world_size, options)
    return str(caught.value)


def _run(world_size=2, **options):
    records = run_ranks(_train, world_size, world_size, options)
    assert all(_losses(record) == _losses(records[0]) for record in records)
    return records[0]


def _losses(record, kind="steps"):
    return {entry["step"]: entry["loss"] for entry in record[kind]}


SHARDED_MUON = {"optimizer": "muon", "ddp": "sharded"}
only_ours = pytest.mark.beyond_torch("shards the optimizer")


@pytest.mark.parametrize(
    "options",
    [{}, {"grad_accum": 2}, {"optimizer": "muon"}, pytest.param(SHARDED_MUON, marks=only_ours)],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(text, tmp_path, options):
    options = {"data": text, **options}
    whole = _run(**options)
    begun = _run(**options, checkpoint=tmp_path / "c.pt", stop_after=3)
    ended = _run(**options, checkpoint=tmp_path / "c.pt", resume=True)
    assert list(_losses(begun)) == [1, 2, 3] and list(_losses(ended)) == [4, 5, 6, 7, 8]
    assert {**_losses(begun), **_losses(ended)} == _losses(whole)
    validation = _losses(begun, "validation") | _losses(ended, "validation")
    assert _losses(whole, "validation").items() <= validation.items()
    assert [step["lr"] for step in begun["steps"] + ended["steps"]] == [step["lr"] for step in whole["steps"]]


@only_ours
@pytest.mark.parametrize("ranks", [1, 3])
def test_sharded_muon_learns_and_resumes_on_another_number_of_ranks(text, tmp_path, ranks):
    options = {"data": text, **SHARDED_MUON, "checkpoint": tmp_path / "c.pt"}
    begun = _run(**options, stop_after=6)
    torchs = _run(data=text, optimizer="muon", ddp="torch", stop_after=6)
    assert _losses(begun) == pytest.approx(_losses(torchs), rel=1e-3)
    ended = _run(ranks, **options, resume=True)
    assert list(_losses(ended)) == [7, 8]
    assert max(_losses(ended).values()) < _losses(begun)[1] - 0.1


def test_what_changes_losses_and_what_does_not(text):
    mine, torchs, measured = _run(data=text), _run(data=text, ddp="torch"), _run(data=text, measure_comm=2)
    assert _losses(mine) == _losses(torchs) == _losses(measured)
    assert _losses(mine, "validation") == _losses(torchs, "validation")
    assert _losses(mine)[8] < _losses(mine)[1] - 0.1
    assert mine["communication"] == []
    probed = [step["step"] for step in measured["steps"] if step["probed"]]
    assert probed == [probe["step"] for probe in measured["communication"]] == [5, 7]
    for probe in measured["communication"]:
        assert probe["exposed_ms"] == probe["synchronized_ms"] - probe["local_ms"]
        assert probe["local_ms"] > 0
    others = [_losses(_run(data=text, stop_after=2, **o)) for o in ({"seed": 1}, {"grad_accum": 2})]
    assert len({_losses(mine)[2], *(losses[2] for losses in others)}) == 3


def test_ranks_with_different_or_missing_data_refuse_together(text, tmp_path):
    def other_data(rank, path):
        return _refused(rank, 2, {"data": path if rank == 1 else text})

    other = tmp_path / "other"
    other.write_bytes(text.read_bytes()[:-1] + b"!")
    words = "rank 1 has different data than rank 0: all ranks need the same"
    assert run_ranks(other_data, 2, other) == [words, words]
    words = f"rank 1: no such data: {tmp_path / 'nowhere'}"
    assert run_ranks(other_data, 2, tmp_path / "nowhere") == [words, words]


def _command(*options, ranks=None):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *([*launcher, "--nproc-per-node", str(ranks)] if ranks else []), str(SCRIPT)]
    for name in ("batch_size", "block_size", "layers", "width", "heads", "device"):
        command += ["--" + name.replace("_", "-"), str(SMALL[name])]
    # Run from another folder: the script finds its modules.
    return subprocess.run([*command, *map(str, options)], cwd="/", capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_torchrun_trains_and_leaves_metrics(text, tmp_path):
    run = _command("--ddp", DDP, "--data", text, "--steps", 6, "--json", tmp_path / "new" / "m.json", ranks=2)
    assert run.returncode == 0, run.stderr
    record = json.loads((tmp_path / "new" / "m.json").read_text())
    assert record["world_size"] == 2
    assert record["summary"]["final_train_loss"] == record["steps"][-1]["loss"]
    assert record["versions"]["torch"] == torch.__version__
    assert record["memory"]["peak_rss_bytes"] > 50e6
    assert run.stdout.count(f"{DDP}: step 6/6  train loss") == 1  # only rank 0 prints
