"""gradient_stats=True: norm and non-finite count of the averaged gradients of each bucket."""

import math

import pytest
import torch

import torchddp
from tests.harness import each, on_ranks
from tests.models import Mlp, same_on_all_ranks, seeded, step_on
from tests.whole_buckets import WholeBuckets
from torchddp import Checks

pytestmark = pytest.mark.beyond_torch("does not measure gradients")

CLASSES = [torchddp.DistributedDataParallel, WholeBuckets]


def expected_stats(ddp):
    """The statistics of each bucket in double, from the gradients themselves."""
    grads = [p.grad.double() for p in ddp.module.parameters() if p.requires_grad]
    rows = []
    for bucket in ddp.reducer.plan.buckets:
        flat = torch.cat([grads[index].flatten() for index in bucket.params])
        rows.append([float(flat.square().sum()), int((~flat.isfinite()).sum())])
    return torch.tensor(rows, dtype=torch.float64)


def measured_vector(numel, dtype):
    """A model with one parameter, whose gradient is the model's input."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(numel, dtype=dtype))
    module.forward = lambda x: (module.weight * x).sum().real
    return torchddp.DistributedDataParallel(module, checks=Checks(gradient_stats=True))


@on_ranks(1, 2, 3)
def test_stats_describe_the_averages(rank):
    for ddp_class, options in each(CLASSES, [{}, {"transport": "c10d"}, {"gradient_as_bucket_view": False}]):
        ddp = ddp_class(seeded(Mlp), checks=Checks(gradient_stats=True), bucket_cap_mb=0.001, **options)
        for step in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                step_on(ddp, rank, 10 + step)
            step_on(ddp, rank, step)
            stats = ddp.gradient_stats()
            assert len(stats) > 1
            torch.testing.assert_close(stats, expected_stats(ddp), rtol=1e-12, atol=0)
        assert same_on_all_ranks([stats])


@on_ranks(2)
def test_one_bad_value_on_one_rank_is_counted_on_all(rank):
    for ddp_class, value in each(CLASSES, (float("inf"), float("nan"))):
        ddp = ddp_class(seeded(Mlp), checks=Checks(gradient_stats=True))
        weight = ddp.module.last.weight
        rows = torch.arange(rank)
        handle = weight.register_hook(lambda g, rows=rows, value=value: g.index_fill(0, rows, value))
        step_on(ddp, rank)
        squares, bad = ddp.gradient_stats().sum(0).tolist()
        assert bad == weight.shape[1] and not math.isfinite(squares)
        handle.remove()
        ddp.zero_grad()
        step_on(ddp, rank)
        assert ddp.gradient_stats()[:, 1].sum() == 0
    with pytest.raises(RuntimeError, match="gradient_stats=True"):
        torchddp.DistributedDataParallel(seeded(Mlp)).gradient_stats()


@on_ranks(1)
def test_extreme_values(rank):
    """Infinities and NaNs are counted at any position, and squares are summed in double, for every dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        gradient = torch.ones(5003, dtype=dtype)
        gradient[7] = float("inf")
        for last, row in ((1.0, "[inf, 1.0]"), (float("nan"), "[nan, 2.0]")):
            gradient[5002] = last
            ddp = measured_vector(5003, dtype)
            ddp(gradient).backward()
            assert str(ddp.gradient_stats()[0].tolist()) == row, dtype
    extremes = [(torch.float64, 1e150), (torch.float16, 6e4)]
    extremes += [(dtype, 3e38) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
    for dtype, value in extremes:
        ddp = measured_vector(2000, dtype)
        ddp(torch.full([2000], value, dtype=dtype)).backward()
        exact = abs(torch.tensor(value, dtype=dtype).item()) ** 2 * 2000
        assert ddp.gradient_stats()[0].tolist() == [pytest.approx(exact, rel=1e-12), 0], dtype
