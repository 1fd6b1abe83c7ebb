"""PowerSGD: exact if possible, otherwise as accurate as torch's, and robust to non-finite or empty matrices."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.comm_hooks import SHAPES, Given, assert_near, average, given, hooked, live_on, step_of
from tests.harness import on_ranks
from torchddp.comm_hooks import BF16, FP16, PowerSGD
from torchddp.comm_hooks.power_sgd import orthonormal

pytestmark = pytest.mark.beyond_torch("hooks of its own")
MATRICES = ("embed", "wide", "narrow")
PLACES = [(2, None), (3, None), pytest.param(4, "aabb", marks=pytest.mark.slow)]
VECTORS = ("norm", "bias", "long")


def low_rank(rank, step):
    """Matrices whose average has at most rank 2, because all ranks' rows lie in one plane."""
    gradients = given(rank, step)
    generator = torch.Generator().manual_seed(step)
    for name in MATRICES:
        rows, *rest = SHAPES[name]
        plane = torch.randn(2, torch.Size(rest).numel(), generator=generator)
        mix = torch.randn(rows, 2, generator=torch.Generator().manual_seed(77 * step + rank))
        gradients[name] = (mix @ plane).view(SHAPES[name])
    return gradients


@pytest.mark.parametrize(("world_size", "hosts"), PLACES)
@on_ranks()
def test_matrices_of_that_rank_are_sent_exactly(rank, hosts):
    live_on(hosts, rank)
    for hook in (PowerSGD(2), PowerSGD(5, warm_start=False, error_feedback=False), PowerSGD(3, start_step=1)):
        model = hooked(hook)
        for step in range(3):
            assert_near(step_of(model, low_rank(rank, step)), average(step, low_rank), 1e-3, f"step {step}")


@on_ranks(2)
def test_bytes(rank):
    hook = PowerSGD(2)
    step_of(hooked(hook, bucket_cap_mb=100), low_rank(rank, 0))
    numbers = sum((rows + columns) * 2 for rows, columns in ((40, 30), (24, 27), (40, 30)))
    numbers += sum(torch.Size(SHAPES[name]).numel() for name in VECTORS)
    assert hook.traffic.wire_bytes == 4 * numbers


@on_ranks(2)
def test_as_accurate_as_torchs(rank):
    """Power iterations on one gradient without error feedback: both approach the best approximation."""
    ours, theirs = hooked(PowerSGD(3, error_feedback=False)), TorchDDP(Given())
    state = torch_power_sgd.PowerSGDState(
        None, matrix_approximation_rank=3, start_powerSGD_iter=2, use_error_feedback=False, min_compression_rate=2
    )
    theirs.register_comm_hook(state, torch_power_sgd.powerSGD_hook)
    for _ in range(15):
        mine, other = step_of(ours, given(rank, 0)), step_of(theirs, given(rank, 0))
    for name in MATRICES:
        exact = average(0)[name].flatten(1)
        best = torch.linalg.svdvals(exact)[3:].square().sum().sqrt()
        for value in (mine, other):
            assert best * 0.999 <= (value[name].flatten(1) - exact).norm() <= best * 1.03, name


@on_ranks(2)
def test_zero_dependent_and_tiny_gradients(rank):
    def odd(rank, step):
        gradients = given(rank, step)
        gradients["embed"] = torch.zeros(SHAPES["embed"]) if step < 2 else gradients["embed"] * 1e-30
        gradients["wide"] = torch.ones(SHAPES["wide"])
        gradients["narrow"] = gradients["narrow"] * (1e-42 if step else 1.0)
        return gradients

    model = hooked(PowerSGD(2))
    for step in range(5):
        averages = step_of(model, odd(rank, step))
        assert all(torch.isfinite(value).all() for value in averages.values())
        torch.testing.assert_close(averages["wide"], torch.ones(SHAPES["wide"]).double(), rtol=1e-5, atol=1e-5)
        assert step != 1 or (averages["embed"] == 0).all()
    assert averages["embed"].norm() > 1e-31  # zeros did not stop it permanently


def test_orthonormal_columns_of_anything():
    generator = torch.Generator().manual_seed(1)
    some = torch.randn(3, 7, 3, generator=generator)
    dependent = torch.cat([some[..., :1], 2 * some[..., :1], torch.zeros(3, 7, 1)], -1)
    for matrices in (some, dependent, torch.zeros(3, 7, 3), some * 1e-38, some * 1e-44, some * 1e37, some[:, :3]):
        basis = orthonormal(matrices)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(3).expand(3, 3, 3), rtol=0, atol=1e-6)
        scaled = matrices.double() / matrices.abs().max().clamp_min(1e-45)
        projected = basis.double() @ (basis.double().mT @ scaled)
        torch.testing.assert_close(projected, scaled, rtol=0, atol=1e-5)


@on_ranks(2)
def test_casts_are_torchs_within_a_rounding(rank):
    for make, dtype, torch_hook in (
        (FP16, torch.float16, default_hooks.fp16_compress_hook),
        (BF16, torch.bfloat16, None),  # torch's refuses CPU models
    ):
        ours, theirs = hooked(make()), TorchDDP(Given())
        if torch_hook is not None:
            theirs.register_comm_hook(None, torch_hook)
        for step in range(2):
            mine, other = step_of(ours, given(rank, step)), step_of(theirs, given(rank, step))
            for name, value in mine.items():
                first, second = ((given(r, step)[name] / 2).to(dtype).float() for r in range(2))
                assert torch.equal(value, (first + second).double()), (torch_hook, name)  # summed in fp32
                allowed = 2 * torch.finfo(dtype).eps * (first.abs() + second.abs()) + 1e-7
                assert ((value - other[name]).abs() <= allowed).all(), (torch_hook, name)
