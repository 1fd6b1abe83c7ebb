"""The Trainer with torchddp's strategies, compared with Lightning's: two ranks, started by Lightning."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed: make test-clients")

from tests.clients.common import assert_has_the_losses_of_its_page, launch, saved_by_ranks
from tests.clients.lightning_life import RESUMED
from tests.clients.lightning_matrix import CASES

pytestmark = pytest.mark.timeout(600)

# Buffers, and parameters between two averages, differ between ranks.
RANKS_DIFFER = {"batch_norm", "post_local_sgd"}
# The norm is a sum of the ranks' sums of squares, which rounds differently from one sum over all parameters.
OTHER_ORDER = {("clip_norm", "torchddp_sharded"), ("bf16_mixed_clip", "torchddp_sharded")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of all cases, trained in one launch, by rank."""
    return saved_by_ranks("tests.clients.lightning_matrix", tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return saved_by_ranks("tests.clients.lightning_life", tmp_path_factory.mktemp("life"))


def _assert_equal(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(state[name], value, **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_trains_like_lightnings_own_strategy(trained: list[dict[str, Any]], case: str) -> None:
    for rank in range(2):
        theirs, *ours = trained[rank][case]
        assert theirs["finished"] == 0, "Lightning's own strategy ran our reducer"
        for result in ours:
            exact = (case, result["strategy"]) not in OTHER_ORDER
            _assert_equal(result["state"], theirs["state"], 0.0 if exact else 1e-6)
            assert result["finished"] > 0
            assert result["model_is_module"], "teardown left the wrapper"
            assert not exact or result["seen"] == theirs["seen"]
    for first, second in zip(trained[0][case], trained[1][case], strict=True):
        same = all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
        assert same == (case not in RANKS_DIFFER)


def test_only_synchronized_steps_are_reduced(trained: list[dict[str, Any]]) -> None:
    for case, steps in (("default", 6), ("accumulate", 3), ("manual_accumulate", 3), ("two_optimizers", 12)):
        assert [result["finished"] for result in trained[0][case][1:]] == [steps] * (len(trained[0][case]) - 1)


@pytest.mark.parametrize("strategy", ["torchddp", "torchddp_sharded"])
def test_fit_twice_then_test(lived: list[dict[str, Any]], strategy: str) -> None:
    for rank in range(2):
        result, theirs = lived[rank][f"twice {strategy}"], lived[rank]["twice ddp"]
        _assert_equal(result["state"], theirs["state"])
        assert result["tested"] == theirs["tested"]
        assert result["freed"] == [True, True], "the wrapper of a fit is still alive"
        assert result["gradients"] and all(result["storages"]) and not any(result["hooks"])


@pytest.mark.parametrize(("saved", "resumed"), RESUMED)
def test_checkpoints_load_under_other_strategies(lived: list[dict[str, Any]], saved: str, resumed: str) -> None:
    for rank in range(2):
        result, theirs = lived[rank][f"checkpoint {saved} {resumed}"], lived[rank]["checkpoint ddp ddp"]
        _assert_equal(result["state"], theirs["state"])
        for part in ("keys", "model_keys", "optimizer", "groups"):
            assert result[part] == theirs[part], part


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("strategy", ["torchddp", "instance"])
def test_fabric(lived: list[dict[str, Any]], strategy: str, accumulate: bool) -> None:
    for rank in range(2):
        result, theirs = lived[rank][f"fabric {strategy} {accumulate}"], lived[rank][f"fabric ddp {accumulate}"]
        _assert_equal(result["state"], theirs["state"])
        assert (theirs["finished"], result["finished"]) == (0, 3 if accumulate else 6)


def test_example() -> None:
    ended = launch("-m", "examples.train_lightning", "--strategy", "torchddp", "--epochs", "2", "--points", "512")
    assert "strategy torchddp: " in ended.stdout and "of 512 points after 2 epochs" in ended.stdout


def test_the_muon_pages_program(tmp_path: Path) -> None:
    assert_has_the_losses_of_its_page("muon.md", "Lightning", tmp_path)
