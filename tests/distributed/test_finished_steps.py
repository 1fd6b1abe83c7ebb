"""The count that tells that torchddp's reducer really ran."""

import pytest
import torch

import torchddp
from tests.harness import on_ranks
from tests.models import Mlp, seeded, step_on

pytestmark = pytest.mark.beyond_torch("counts nothing")


@on_ranks(1, 2)
def test_each_synchronised_backward_of_ours_counts(rank):
    before = torchddp.finished_steps()
    ddp = torchddp.DistributedDataParallel(seeded(Mlp))
    for step in range(3):
        step_on(ddp, rank, step)
    with ddp.no_sync():
        step_on(ddp, rank, 3)
    del ddp  # those of models that are gone count too
    step_on(seeded(Mlp), rank)
    step_on(torch.nn.parallel.DistributedDataParallel(seeded(Mlp)), rank)
    assert torchddp.finished_steps() - before == 3
