"""The GPT examples resume as if uninterrupted: on other ranks, with hooks' residuals, after a crash."""

from datetime import timedelta

import pytest
import torch
from rich.console import Console

from examples import demo_faults
from examples.gpt.config import TrainConfig
from examples.gpt.data import load_corpus
from examples.gpt.errors import ExampleError
from examples.gpt.faults import Journal
from examples.gpt.ranks import Ranks
from examples.train_elastic import ElasticTrainer
from examples.train_gpt import train_on
from tests.harness import GROUP_TIMEOUT_S, is_own_class, on_ranks, run_ranks
from tests.models import same_on_all_ranks

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
def test_sharded_muon_learns_and_resumes_on_another_number_of_ranks(text, tmp_path):
    options = {"data": text, **SHARDED_MUON, "checkpoint": tmp_path / "c.pt"}
    begun = _run(**options, stop_after=6)
    torchs = _run(data=text, optimizer="muon", ddp="torch", stop_after=6)
    assert _losses(begun) == pytest.approx(_losses(torchs), rel=1e-3)
    ended = _run(3, **options, resume=True)
    assert list(_losses(ended)) == [7, 8]
    assert max(_losses(ended).values()) < _losses(begun)[1] - 0.1


ELASTIC = {**SMALL, "steps": 6, "layers": 1, "eval_interval": 6, "eval_batches": 1, "save_every": 3}


def _elastic(rank, folder, text, **options):
    config = TrainConfig(**{**ELASTIC, "data": text, "checkpoint": folder / "gpt.pt", **options})
    ranks = Ranks(rank, rank, 2, torch.device("cpu"), has_group=True)
    corpus, timeout = load_corpus(text, config.block_size), timedelta(seconds=GROUP_TIMEOUT_S)
    return ElasticTrainer(config, ranks, corpus, timeout=timeout, journal=Journal(folder / "journal", rank), fault=None)


@only_ours
@on_ranks(2)
def test_a_checkpoint_has_the_residuals_of_each_ranks_hook(rank, text, tmp_path):
    first = _elastic(rank, tmp_path, text, comm_hook="int8", stop_after=3)
    first.run()
    with pytest.raises(ExampleError, match="comm_hook int8 there, None here"):
        _elastic(rank, tmp_path, text).resume()
    second = _elastic(rank, tmp_path, text, comm_hook="int8")
    second.resume()
    was, now = first.hook.state_dict(), second.hook.state_dict()
    assert was["step"] == now["step"] == 3
    assert was["residual"].keys() == now["residual"].keys() and was["residual"]
    for name, value in was["residual"].items():
        assert torch.equal(value, now["residual"][name]), name
    second.run()
    assert any(value.any() for value in was["residual"].values())
    assert not same_on_all_ranks(was["residual"].values())


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
