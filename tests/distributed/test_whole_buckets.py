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


@pytest.mark.parametrize("nonfinite", [False, True])
@pytest.mark.parametrize("views", [None, True])
def test_gradients_become_memory_of_the_bucket(views, nonfinite):
    """No second copy of them is kept, and none is copied back."""

    def work(rank):
        options = {} if views is None else {"gradient_as_bucket_view": views}
        whole = WholeBuckets(seeded(Mlp), find_nonfinite=nonfinite, **options)
        for step in range(3):
            whole.zero_grad()
            step_on(whole, rank, step)
        gradients = [param.grad for param in whole.parameters()]
        for bucket in whole.reducer.plan.buckets:
            begins = {
                gradients[param].data_ptr() - offset * gradients[param].itemsize
                for param, offset in zip(bucket.params, bucket.offsets, strict=True)
            }
            assert len(begins) == 1 < len(bucket.params)

    run_ranks(work, 2)
