"""The count that tells that torchddp's reducer really ran."""

import pytest
import torch

import torchddp
from tests.harness import gathered, on_ranks
from tests.models import Mlp, batch, loss_of, seeded, step_on

pytestmark = pytest.mark.beyond_torch("counts nothing")


@on_ranks(1, 2)
def test_each_synchronised_backward_counts(rank, world_size):
    before = torchddp.finished_steps()
    ddp = torchddp.DistributedDataParallel(seeded(Mlp))
    for step in range(3):
        step_on(ddp, rank, step)
    with ddp.no_sync():
        step_on(ddp, rank, 3)
    del ddp  # those of models that are gone count too
    loss_of(seeded(Mlp)(batch(rank, 0))).backward()
    assert gathered(torchddp.finished_steps() - before) == [3] * world_size


@on_ranks(2)
def test_torchs_class_does_not_count(rank):
    before = torchddp.finished_steps()
    step_on(torch.nn.parallel.DistributedDataParallel(seeded(Mlp)), rank, 0)
    assert gathered(torchddp.finished_steps() - before) == [0, 0]
