"""Methods of the training benchmarks: one that fails is dropped on all ranks, and the others continue."""

from functools import partial

import torch.distributed as dist

from benchmarks.convergence.job import OUTER_STEPS
from benchmarks.training.attempt import entrant
from benchmarks.training.replica import Replica
from benchmarks.training.tasks import gpt_for_one_host, shortened
from tests.harness import on_ranks

TIMEOUT_S = 20.0


def fails_on_rank_one(replica):
    if dist.get_rank() == 1:
        raise ValueError("no such luck\nand more")


@on_ranks(2)
def test_a_method_that_fails_on_one_rank_is_dropped_on_all(rank):
    small = shortened(gpt_for_one_host(), 4)
    with (
        entrant("torch-ddp", small, 0, OUTER_STEPS, TIMEOUT_S) as unlucky,
        entrant("torch-powersgd", small, 0, OUTER_STEPS, TIMEOUT_S) as other,
    ):
        first = other.held_out_loss(small)
        assert first is not None and first == unlucky.held_out_loss(small)
        assert not unlucky.try_to(fails_on_rank_one)
        assert unlucky.problem == "rank 1: ValueError: no such luck"
        # It stays dropped, and no rank waits for it.
        assert not unlucky.try_to(lambda replica: None) and unlucky.held_out_loss(small) is None
        assert other.try_to(partial(Replica.step, batch=small.batch(0, 0, rank, 2), lr=small.lr))
        last = other.held_out_loss(small)
        assert last is not None and last < first

    # A method that cannot be built is dropped with the reason.
    with entrant("nothing", small, 0, OUTER_STEPS, TIMEOUT_S) as entry:
        assert entry.problem == "KeyError: 'nothing'"
