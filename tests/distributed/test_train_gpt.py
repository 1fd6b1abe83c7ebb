"""The GPT examples resume as if uninterrupted, also after a crash."""

import pytest
import torch
from rich.console import Console

from examples import demo_faults
from examples.gpt.config import TrainConfig
from examples.gpt.ranks import Ranks
from examples.train_gpt import train_on
from tests.harness import is_own_class, run_ranks

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
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 60)
    return path


def _train(rank, world_size, options):
    ranks = Ranks(rank, rank, world_size, torch.device("cpu"), has_group=True)
    return train_on(TrainConfig(**{**SMALL, "ddp": DDP, **options}), ranks)


def _run(world_size=2, **options):
    records = run_ranks(_train, world_size, world_size, options)
    assert all(_losses(record) == _losses(records[0]) for record in records)
    return records[0]


def _losses(record, kind="steps"):
    return {entry["step"]: entry["loss"] for entry in record[kind]}


SHARDED_MUON = {"optimizer": "muon", "ddp": "sharded"}
only_ours = pytest.mark.beyond_torch("shards the optimizer, or raises another error")


@pytest.mark.parametrize(
    "options", [{"grad_accum": 2}, pytest.param(SHARDED_MUON, marks=only_ours)], ids=["accumulated", "sharded"]
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


@only_ours
@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_ends_with_the_same_weights(tmp_path):
    plan = demo_faults.Plan(steps=8, save_every=3, die_at=5)
    console = Console(file=(tmp_path / "out").open("w"), width=100)
    result = demo_faults.run_demo(["kill"], plan, seed=3, out=tmp_path, timeout_s=500, console=console)
    assert result["ok"], (tmp_path / "faults.log").read_text()
    uninterrupted, killed = result["runs"]
    assert killed["restarts"] == 1 and killed["resumed_from"] == 3
    assert killed["noticed_by"] == 0
    assert "TransportError: rank 1 died" in killed["error"] and "rank 0, step 5" in killed["error"]
    assert killed["weights_sha256"] == uninterrupted["weights_sha256"]
    assert killed["final_loss"] == uninterrupted["final_loss"]
