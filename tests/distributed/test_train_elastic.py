"""The elastic example: restarted runs end like uninterrupted ones, and checkpoints contain hooks' residuals."""

import json
import os
import signal
from datetime import timedelta

import pytest
import torch
import typer
from rich.console import Console

from examples import demo_faults
from examples.gpt.config import TrainConfig
from examples.gpt.data import load_corpus
from examples.gpt.errors import ExampleError
from examples.gpt.faults import Journal, read_journal
from examples.gpt.ranks import Ranks
from examples.train_elastic import EXIT_TERMINATED, ElasticTrainer
from tests.distributed.test_train_gpt import SMALL as TWO_LAYERS
from tests.distributed.test_train_gpt import TEXT
from tests.harness import GROUP_TIMEOUT_S, on_ranks
from tests.models import same_on_all_ranks

pytestmark = pytest.mark.beyond_torch("raises another error")

SMALL = {**TWO_LAYERS, "steps": 6, "layers": 1, "eval_interval": 6, "eval_batches": 1, "save_every": 3}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    return path


def _trainer(rank, folder, text, fault=None, **options):
    config = TrainConfig(**{**SMALL, "data": text, "checkpoint": folder / "gpt.pt", **options})
    ranks = Ranks(rank, rank, 2, torch.device("cpu"), has_group=True)
    journal = Journal(folder / "journal", rank)
    corpus = load_corpus(text, config.block_size)
    return ElasticTrainer(
        config, ranks, corpus, timeout=timedelta(seconds=GROUP_TIMEOUT_S), journal=journal, fault=fault
    )


@pytest.mark.parametrize("hook", ["int8", "powersgd"])
@on_ranks(2)
def test_a_checkpoint_has_the_residuals_of_each_ranks_hook(rank, text, tmp_path, hook):
    first = _trainer(rank, tmp_path, text, comm_hook=hook, stop_after=3)
    first.run()
    with pytest.raises(ExampleError, match=f"comm_hook {hook} there, None here"):
        _trainer(rank, tmp_path, text).resume()
    second = _trainer(rank, tmp_path, text, comm_hook=hook)
    second.resume()
    was, now = first.hook.state_dict(), second.hook.state_dict()
    assert was["step"] == now["step"] == 3
    assert was["residual"].keys() == now["residual"].keys() and was["residual"]
    for name, value in was["residual"].items():
        assert torch.equal(value, now["residual"][name]), name
    second.run()
    assert any(value.any() for value in was["residual"].values())
    assert not same_on_all_ranks(was["residual"].values())


@on_ranks(2)
def test_after_sigterm_it_exits_between_steps(rank, text, tmp_path):
    trainer = _trainer(rank, tmp_path, text)
    inner = trainer._update

    def end():
        inner()
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._update = end
    with pytest.raises(typer.Exit) as caught:
        trainer.run()
    assert (trainer.step, caught.value.exit_code) == (2, EXIT_TERMINATED)
    assert {event.kind for event in read_journal(tmp_path / "journal")} == {"asked to end"}


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
    assert json.loads((tmp_path / "faults.json").read_text()) == json.loads(json.dumps(result))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["faults.json", "faults.log", "out"]
