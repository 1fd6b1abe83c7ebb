"""Weighted means with Accelerate and the Trainer: ranks with unequal token counts train like one process with all."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")

from tests.clients.accelerate_ranks import alone  # noqa: F401
from tests.clients.common import saved_by_ranks
from torchddp.integrations.accelerate import Accelerator, weigh
from torchddp.integrations.accelerate.token_weights import StepLosses, TokenWeights, count_items

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.beyond_torch("is not tested here")]

ROUNDING = 5e-6  # of float32, relative to how far the weights moved
ANOTHER_MEAN = 0.01


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results by rank."""
    folder = tmp_path_factory.mktemp("weighted")
    return saved_by_ranks("tests.clients.weighted_accelerate_jobs", folder, ranks=2, timeout_s=300)


def test_accelerate(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for how, found in of_rank["loops"].items():
            assert found["error"] < ROUNDING, how
            assert found["steps"] == 4, how  # two per epoch, the second with fewer microbatches
        without = of_rank["loops without weights"]
        assert without.keys() == of_rank["loops"].keys()
        assert all(found["error"] > ANOTHER_MEAN for found in without.values()), without


def test_misuse(results: list[dict[str, Any]]) -> None:
    said = results[1]["misuse"]
    assert said["bare"].startswith("RuntimeError: only torchddp's classes can weight gradients, and this model is a ")
    assert "pass the model that prepare() returned" in said["bare"]
    assert "is a torch.nn.parallel.distributed.DistributedDataParallel: " in said["torch's"]
    assert said["negative"] == "ValueError: the weight on rank 1 must be 0 or more, and finite, got -1"
    assert said["each batch"].startswith("RuntimeError: weigh() can't be used with sync_each_batch=True")


@pytest.mark.parametrize(
    "how", ["counts", "means", "syncs_each_batch", "num_steps", "function", "counts_itself", "idle_rank"]
)
def test_trainer(results: list[dict[str, Any]], how: str) -> None:
    """Weights and the logged loss; rank 0 has a microbatch without labels, and nothing is gathered."""
    for of_rank in results:
        ours = of_rank["trainings"][how]
        assert ours["error"] < ROUNDING
        assert ours["loss error"] < ROUNDING and ours["mean loss error"] < ROUNDING
        assert ours["microbatches"] == [3, 2, 3, 2]
        assert ours["steps"] == (10 if how == "syncs_each_batch" else 4)
        assert ours["averages across devices"]  # the user's argument is unchanged
        assert ours["gathers"] == 0


def test_trainer_without_weights(results: list[dict[str, Any]]) -> None:
    """Without weights, results are far off or each step gathers."""
    for of_rank in results:
        plain, averages = of_rank["trainings"]["plain"], of_rank["trainings"]["plain, averages"]
        assert plain["error"] > ANOTHER_MEAN and plain["loss error"] > 1e-3
        assert averages["error"] < ROUNDING and averages["gathers"] == 4


def test_losses_that_are_logged_rarely_or_in_evaluation(results: list[dict[str, Any]]) -> None:
    ours, theirs = results[0]["folds"].values()
    assert ours == pytest.approx(theirs, rel=ROUNDING) and len(ours) == 1
    ours, theirs = results[0]["evaluations"]
    assert ours == theirs


def test_no_label_on_any_rank(results: list[dict[str, Any]]) -> None:
    for rank in range(2):
        found = results[rank]["nothing_at_all"]
        assert "ValueError" in found["said"] and f"rank {rank}, step 1: no rank gave this step" in found["said"]
        assert found["stays"] and found["losses"] == [0.0] * 4


def test_the_page(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["page"]["accelerate"] < ROUNDING and of_rank["page"]["trainer"] < ROUNDING
        assert of_rank["page"]["items"] == 3 + 4


@pytest.mark.usefixtures("alone")
def test_a_single_process_is_not_weighted_and_microbatches_warn() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.weigh(model, 3)
    accelerator.gradient_accumulation_steps = 2
    with pytest.warns(UserWarning, match="in a single process the model is not wrapped"):
        weigh(accelerator, model, 3)


def test_items_of_a_microbatch() -> None:
    labels = torch.tensor([[1, -100, 3], [-100, -100, 5]])
    assert count_items({"labels": labels}, shifts_labels=False) == 3
    assert count_items({"labels": labels}, shifts_labels=True) == 2
    assert count_items({"labels": labels, "shift_labels": labels[:, :1]}, shifts_labels=True) == 1
    assert count_items({"pixels": torch.zeros(4, 2)}, shifts_labels=False) == 4


def test_a_microbatch_that_was_not_counted() -> None:
    accelerator: Any = SimpleNamespace(
        gradient_state=SimpleNamespace(plugin_kwargs={}), num_processes=1, gradient_accumulation_steps=1
    )
    model, weights = torch.nn.Linear(1, 1), TokenWeights.of_means([5, torch.tensor(4)], divided_by=2)
    assert weights.count == 9
    with pytest.warns(UserWarning, match="microbatches of a step count equally"):
        assert weights.weigh(model, accelerator) == 10
    assert weights.weigh(model, accelerator) == 8
    with pytest.raises(RuntimeError, match=r"a microbatch that get_batch_samples\(\) has not counted"):
        weights.weigh(model, accelerator)


def test_losses_of_steps_are_separate_means() -> None:
    losses = StepLosses(lambda tensor: tensor, torch.device("cpu"))
    losses.begin(4)
    losses.add(torch.tensor(2.0), 3)
    losses.add(torch.tensor(float("nan")), 0)
    losses.begin(0)
    losses.begin(1)
    losses.add(torch.tensor(5.0), 1)
    assert losses.take() == 1.5 + 0.0 + 5.0
    assert losses.take() == 0.0
