"""The device code path, which packs whole buckets, gives bitwise equal results."""

import pytest
import torch

from tests.gpu.test_pack_gpu import FLOATS, Given, assert_same, random_values, scaled
from tests.harness import each, on_ranks
from tests.models import Mlp, assert_grads, grads_of, seeded, step_on
from tests.whole_buckets import LargeApart, WholeBuckets

pytestmark = pytest.mark.beyond_torch("packs whole buckets in its own way")


@on_ranks(1, 3)
def test_same_bits_as_packing_in_the_hook(rank, ddp_class, world_size):
    for transport, views, whole_class in each(["c10d", "auto"], [None, True, False], [WholeBuckets, LargeApart]):
        options = {"transport": transport, "gradient_as_bucket_view": views, "bucket_cap_mb": 0.001}
        ours, whole = ddp_class(seeded(Mlp), **options), whole_class(seeded(Mlp), **options)
        assert len(whole.reducer.plan.buckets) > 1
        for step in range(4):
            # With and without existing gradients.
            for ddp in (ours, whole):
                ddp.zero_grad(set_to_none=step % 2 == 0)
                with ddp.no_sync():
                    step_on(ddp, rank, 10 + step)
                step_on(ddp, rank, step)
            # With three or more ranks, gloo's order depends on a gradient's position in the message.
            exact = world_size < 3 or whole_class is WholeBuckets
            assert_grads(grads_of(whole), grads_of(ours), 0 if exact else 1e-14, f"step {step}")


@on_ranks(2)
def test_gradients_become_memory_of_the_bucket(rank):
    """There is no second copy, and none is copied back."""
    for views, nonfinite in each([None, True], [False, True]):
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


CPU = torch.device("cpu")
NUMELS = [1, 5, 4096, 70_001]


def given(kind, dtype, gradient, divisor, views):
    ddp = kind(Given(NUMELS, dtype, CPU), bucket_cap_mb=25, gradient_as_bucket_view=views)
    ddp.reducer.set_divisor(lambda: divisor)
    if gradient != dtype:
        ddp.reducer._set_mixed_precision_param_dtype(gradient)
        for param in ddp.parameters():
            param.grad_dtype = None
    return ddp


@on_ranks(1)
def test_bits_of_all_dtypes_and_of_gradients_elsewhere_in_the_bucket(ddp_class):
    # torch's operators, used where no kernel applies, also round once.
    for dtype, gradient, views, divisor in each(FLOATS, FLOATS, (True, False), (1, 3)):
        wide = gradient if torch.promote_types(dtype, gradient) == gradient else torch.promote_types(dtype, gradient)
        values = [random_values(numel, gradient, CPU, k) for k, numel in enumerate(NUMELS)]
        hooked, whole = (given(kind, dtype, gradient, divisor, views) for kind in (ddp_class, WholeBuckets))
        for ddp in (hooked, whole):
            ddp([value.clone() for value in values]).backward()
        for mine, theirs, value in zip(whole.parameters(), hooked.parameters(), values, strict=True):
            assert_same(mine.grad, theirs.grad)
            assert_same(mine.grad, scaled(value.to(wide), divisor).to(dtype).to(mine.grad.dtype))

    # Gradients elsewhere in the bucket are read before they are overwritten.
    whole = WholeBuckets(Given([6, 6], torch.float32, CPU), gradient_as_bucket_view=True)
    values = [torch.arange(6.0), torch.arange(6.0) + 10]
    whole(values).backward()
    first, second = whole.parameters()
    first.grad, second.grad = second.grad, first.grad
    with whole.no_sync():
        whole([torch.zeros(6), torch.zeros(6)]).backward()
    whole([torch.ones(6), torch.ones(6)]).backward()
    assert_same(first.grad, values[1] + 1)
    assert_same(second.grad, values[0] + 1)
