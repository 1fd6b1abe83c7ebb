"""gradient_stats=True: norm and non-finite values of the averaged gradients, by bucket."""

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.harness import gathered, on_ranks
from tests.models import Mlp, grads_of, seeded, step_on
from tests.whole_buckets import WholeBuckets

pytestmark = pytest.mark.beyond_torch("does not measure gradients")

CLASSES = [torchddp.DistributedDataParallel, WholeBuckets]


def expected_stats(ddp):
    """By bucket, in double, from the gradients themselves."""
    grads = [p.grad.double() for p in ddp.module.parameters() if p.requires_grad]
    rows = []
    for bucket in ddp.reducer.plan.buckets:
        flat = torch.cat([grads[index].flatten() for index in bucket.params])
        rows.append([float(flat.square().sum()), int((~flat.isfinite()).sum())])
    return torch.tensor(rows, dtype=torch.float64)


def measured_vector(numel, dtype):
    """One parameter, whose gradient is what the model is called with."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(numel, dtype=dtype))
    module.forward = lambda x: (module.weight * x).sum().real
    return torchddp.DistributedDataParallel(module, gradient_stats=True)


@pytest.mark.parametrize("ddp_class", CLASSES)
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"transport": "c10d"}, {"gradient_as_bucket_view": False}], ids=str)
def test_stats_are_those_of_the_averages(rank, ddp_class, options):
    ddp = ddp_class(seeded(Mlp), gradient_stats=True, bucket_cap_mb=0.001, **options)
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            step_on(ddp, rank, 10 + step)
        step_on(ddp, rank, step)
        stats = ddp.gradient_stats()
        assert stats.shape == (len(ddp.reducer.plan.buckets), 2) and len(stats) > 1
        torch.testing.assert_close(stats, expected_stats(ddp), rtol=1e-12, atol=0)
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        torch.testing.assert_close(stats[:, 0].sum().sqrt(), norm.double(), rtol=1e-5, atol=0)
    results = gathered(stats)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("ddp_class", CLASSES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@on_ranks(2)
def test_one_bad_value_on_one_rank_is_counted_on_all(rank, ddp_class, value):
    ddp = ddp_class(seeded(Mlp), gradient_stats=True)
    bad = rank == 1
    handle = ddp.module.last.weight.register_hook(lambda g: g.index_fill(0, torch.tensor([0]), value) if bad else g)
    step_on(ddp, rank)
    stats = ddp.gradient_stats().clone()
    handle.remove()
    ddp.zero_grad()
    step_on(ddp, rank)
    width = seeded(Mlp).last.weight.shape[1]
    assert (
        gathered(
            (stats[:, 1].sum().item(), bool(stats[:, 0].sum().isfinite()), ddp.gradient_stats()[:, 1].sum().item())
        )
        == [(width, False, 0)] * 2
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@on_ranks(2)
def test_every_floating_dtype(rank, dtype):
    ddp = measured_vector(5003, dtype)
    ddp(torch.linspace(-1, 1, 5003).to(dtype)).backward()
    want = grads_of(ddp)["weight"]
    want = torch.view_as_real(want) if want.is_complex() else want
    torch.testing.assert_close(ddp.gradient_stats()[0, 0], want.double().square().sum(), rtol=1e-12, atol=0)
    assert ddp.gradient_stats()[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@on_ranks(1)
def test_infinities_and_nans_anywhere_are_counted(rank, dtype):
    gradient = torch.ones(5003, dtype=dtype)
    gradient[7] = float("inf")
    rows = []
    for last in (1.0, float("nan")):
        gradient[5002] = last
        ddp = measured_vector(5003, dtype)
        ddp(gradient).backward()
        rows.append(ddp.gradient_stats()[0].tolist())
    assert gathered(str(rows)) == ["[[inf, 1.0], [nan, 2.0]]"]


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float64, 1e150)])
@on_ranks(1)
def test_squares_are_summed_in_double(rank, dtype, value):
    ddp = measured_vector(2000, dtype)
    ddp(torch.full([2000], value, dtype=dtype)).backward()
    exact = torch.tensor(value, dtype=dtype).item() ** 2 * 2000
    assert gathered(ddp.gradient_stats()[0].tolist()) == [[pytest.approx(exact, rel=1e-12), 0]]


@on_ranks(2)
def test_without_the_option_it_is_an_error(rank):
    ddp = torchddp.DistributedDataParallel(seeded(Mlp))
    step_on(ddp, rank)
    with pytest.raises(RuntimeError, match="gradient_stats=True"):
        ddp.gradient_stats()
    dist.barrier()
