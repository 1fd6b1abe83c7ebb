"""The transformers Trainer, both clients after torchddp.install(), and the examples: the bits of torch's class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")

from tests.clients.accelerate_ranks import Results
from tests.clients.common import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torch("is not tested here")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results("tests.clients.transformers_jobs", tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("job", ["plain", "bf16", "unused", "unused_by_default", "own_options", "adopted"])
def test_training_gives_the_bits_of_torchs_class(results: Results, job: str) -> None:
    """Losses and norms too; twelve microbatches are reduced six times."""
    results.assert_same(job, steps=6)


def test_the_trainers_options_reach_our_class(results: Results) -> None:
    assert not results.ours("bf16")["finds unused"]
    assert results.ours("unused")["finds unused"] and results.ours("unused_by_default")["finds unused"]


def test_checkpoints_resume_bitwise_in_either_class(results: Results) -> None:
    for rank in range(2):
        for saved in (results.ours("checkpoints", rank), results.torchs("checkpoints", rank)):
            assert saved["resumed by torch"] == saved["resumed by ours"] == saved["undisturbed"]
            assert (saved["steps of torch"], saved["steps of ours"]) == (0, 3)


def test_a_hook_by_its_name(results: Results) -> None:
    hooked = results.ours("hook_by_name")
    assert hooked["steps"] == 6
    assert hooked["weights"] == results.ours("hook_by_name", 1)["weights"] != results.ours("plain")["weights"]


# --- as they are, after torchddp.install()


def test_accelerate_under_install(tmp_path: Path) -> None:
    jobs = {"plain": 10, "accumulation": 6, "bf16": 10, "power_sgd_hook": 10, "compiled": 10, "synced_late": 1}
    results = Results("tests.clients.accelerate_jobs", tmp_path, "--install", *jobs)
    for job, steps in jobs.items():
        results.assert_same(job, steps)


def test_the_trainer_under_install(tmp_path: Path) -> None:
    results = Results("tests.clients.transformers_jobs", tmp_path, "--install", "plain", "unused")
    for job in ("plain", "unused"):
        results.assert_same(job, steps=6)


# --- examples


def _ours_and_torchs(*arguments: str, own: tuple[str, ...] = (), steps: int) -> dict[str, Any]:
    """What the ranks of an example print last, which is the same with both classes."""
    found = []
    for options, reduced in ((own, steps), (("--torch-ddp",), 0)):
        printed = launch(*arguments, *options, ranks=2).stdout
        ends = [json.loads(text) for text in re.findall(r"\{[^{}]*reduced_steps[^{}]*\}", printed)]  # maybe on one line
        assert len(ends) == 2 and ends[0] == ends[1], printed[-2000:]
        assert ends[0].pop("reduced_steps") == reduced
        found.append(ends[0])
    assert found[0] == found[1]
    return found[0]


def test_train_accelerate() -> None:
    assert _ours_and_torchs("examples/train_accelerate.py", steps=3 * 32)["accuracy"] > 0.8


def test_train_transformers(tmp_path: Path) -> None:
    short = ("examples/train_transformers.py", "--steps", "10")
    end = _ours_and_torchs(*short, own=("--output", str(tmp_path)), steps=10)
    assert end["eval_loss"] < 5.3  # of 256 bytes, untrained: 5.55
    assert (tmp_path / "checkpoint-10" / "model.safetensors").is_file()
