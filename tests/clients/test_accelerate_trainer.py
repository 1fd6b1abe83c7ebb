"""The transformers Trainer over our engine: the bits of torch's class, by our reducer, on two ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")

from tests.clients.accelerate_ranks import Results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torch("is not tested here")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results("transformers_jobs.py", tmp_path_factory.mktemp("transformers"))


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


def test_wrapping_twice_is_refused(results: Results) -> None:
    said = results.ours("wrapped_before")
    assert said.keys() == {"torch", "ours"} and all("model.module" in text for text in said.values())
