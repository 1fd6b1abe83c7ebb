"""The way of devices, where a whole bucket is packed at once, passes every named check and gives the same bits."""

import pytest
import torch

from tests.behaviours import BEHAVIOURS
from tests.harness import run_ranks
from tests.models import Mlp, grads_of, seeded, step_on
from tests.whole_buckets import WholeBuckets

pytestmark = pytest.mark.beyond_torch("packs whole buckets in its own way")


def _one(rank, check):
    check(WholeBuckets, rank)


@pytest.mark.parametrize("behaviour", list(BEHAVIOURS.values()), ids=lambda behaviour: behaviour.name)
def test_behaviour(behaviour):
    run_ranks(_one, 2, behaviour.check)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("transport", ["c10d", "auto"])
@pytest.mark.parametrize("views", [True, False])
def test_same_bits_as_packing_in_the_hook(ddp_class, world_size, transport, views):
    def work(rank):
        options = {"transport": transport, "gradient_as_bucket_view": views, "bucket_cap_mb": 0.001}
        ours, whole = ddp_class(seeded(Mlp), **options), WholeBuckets(seeded(Mlp), **options)
        assert len(whole.reducer.plan.buckets) > 1
        for step in range(4):
            # With and without gradients that are there already.
            for ddp in (ours, whole):
                ddp.zero_grad(set_to_none=step % 2 == 0)
                with ddp.no_sync():
                    step_on(ddp, rank, 10 + step)
                step_on(ddp, rank, step)
            mine, theirs = grads_of(whole), grads_of(ours)
            assert mine.keys() == theirs.keys()
            for name, grad in mine.items():
                assert torch.equal(grad, theirs[name]), (step, name)

    run_ranks(work, world_size)
