"""Weighted means with Lightning: ranks with unequal numbers of samples train like one process with all."""

from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed: make test-clients")

import lightning.pytorch as pl
from lightning.fabric import Fabric

from tests.clients.common import saved_by_ranks
from tests.clients.lightning_models import QUIET
from tests.clients.lightning_weights import Weighted, batches
from torchddp.integrations.lightning import weigh

pytestmark = pytest.mark.timeout(600)

ROUNDING = 5e-6  # of float32, relative to how far the weights moved
ANOTHER_MEAN = 0.01


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return saved_by_ranks("tests.clients.lightning_weights", tmp_path_factory.mktemp("weighted"))


def test_trains_like_one_process(results: list[dict[Any, Any]]) -> None:
    """Microbatches are accumulated; an epoch's last step has fewer, and one has no samples."""
    for of_rank in results:
        for (how, weighs), error in of_rank["errors"].items():
            assert error < ROUNDING if weighs else error > ANOTHER_MEAN, (how, weighs)


def test_misuse(results: list[dict[Any, Any]]) -> None:
    for of_rank in results:
        assert "DistributedDataParallel: use strategy='torchddp'" in of_rank["said"]["lightning's"]
        assert "give weigh() the module that fabric.setup() returned" in of_rank["said"]["fabric"]


def test_a_single_process() -> None:
    """Without a wrapper one microbatch per step is correct; with more, weights would be dropped."""
    alone = {**QUIET, "devices": 1}
    pl.Trainer(max_epochs=1, **alone).fit(Weighted(), batches(1))
    with pytest.raises(RuntimeError, match="which wrap on a single device too"):
        pl.Trainer(max_epochs=1, accumulate_grad_batches=2, **alone).fit(Weighted(), batches(1))
    with pytest.raises(RuntimeError, match="which wrap on a single device too"):
        weigh(Fabric(accelerator="cpu", devices=1).setup(torch.nn.Linear(1, 1)), 1)


def test_other_targets() -> None:
    with pytest.raises(TypeError, match="takes a LightningModule of lightning.pytorch.* got Linear"):
        weigh(torch.nn.Linear(1, 1), 1)
