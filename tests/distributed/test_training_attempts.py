"""Methods of the training benchmarks: one that fails is dropped on all ranks, and the others continue."""

import torch.distributed as dist

from benchmarks.training.race import racers_of
from benchmarks.training.tasks import gpt_for_one_host, shortened
from tests.harness import on_ranks

TIMEOUT_S = 20.0


def fails_on_rank_one(replica):
    if dist.get_rank() == 1:
        raise ValueError("no such luck\nand more")


@on_ranks(2)
def test_a_method_that_fails_on_one_rank_is_dropped_on_all(rank):
    small = shortened(gpt_for_one_host(), 6)
    names = ("torch-ddp", "torch-powersgd", "nothing")
    with racers_of(names, small, 0, TIMEOUT_S, over_link=False) as (unlucky, other, unknown):
        assert other.points[0].loss == unlucky.points[0].loss
        unlucky.try_to(fails_on_rank_one)
        assert unlucky.problem == "rank 1: ValueError: no such luck"
        # It stays dropped, and no rank waits for it.
        unlucky.advance()
        assert unlucky.result() == {"error": "rank 1: ValueError: no such luck"} and len(unlucky.points) == 1
        other.advance()
        assert other.points[1].steps == small.slice_steps and other.points[1].loss < other.points[0].loss
        # A method that cannot be built is dropped with the reason.
        assert unknown.problem == "KeyError: 'nothing'"
