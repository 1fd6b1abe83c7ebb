"""Weighted means with Accelerate and the Trainer: ranks with unequal token counts train like one process with all."""

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")

import accelerate

from tests.clients.common import saved_by_ranks
from tests.clients.test_accelerate import alone  # noqa: F401
from torchddp.integrations.accelerate import weigh

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


@pytest.mark.parametrize("how", ["counts", "function", "idle_rank"])
def test_trainer(results: list[dict[str, Any]], how: str) -> None:
    """The Trainer's own count of tokens is right for models and loss functions that take it."""
    for of_rank in results:
        ours = of_rank["trainings"][how]
        assert ours["error"] < ROUNDING and ours["loss error"] < ROUNDING
        assert ours["microbatches"] == [3, 2, 3, 2] and ours["steps"] == 4


def test_trainer_with_means(results: list[dict[str, Any]]) -> None:
    """A model whose loss is the mean of a microbatch needs a loss function."""
    for of_rank in results:
        assert of_rank["trainings"]["means"]["error"] > ANOTHER_MEAN


def test_the_page(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["page"]["accelerate"] < ROUNDING and of_rank["page"]["trainer"] < ROUNDING


@pytest.mark.usefixtures("alone")
def test_a_single_process_is_not_weighted_and_microbatches_warn() -> None:
    accelerator = accelerate.Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weigh(accelerator, model, 3)
    accelerator.gradient_accumulation_steps = 2
    with pytest.warns(UserWarning, match="in a single process the model is not wrapped"):
        weigh(accelerator, model, 3)
