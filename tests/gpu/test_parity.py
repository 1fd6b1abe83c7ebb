"""One rank on a GPU over NCCL: gradients and weights are bitwise equal to torch's class."""

import copy
from functools import partial

import pytest
import torch

from tests.gpu.cases import CASES, LARGE_BYTES, run_case
from tests.whole_buckets import large_from
from torchddp import DistributedDataParallel


def ways(device: torch.device) -> tuple[tuple[str, int], ...]:
    """Transports, with the size from which gradients count as large."""
    return (("nccl", 0), ("nccl", LARGE_BYTES), ("c10d", 0)) if device.type == "cuda" else (("c10d", 0),)


@pytest.mark.parametrize("name", CASES)
def test_same_as_torch(alone, name):
    if CASES[name].gpu_only and alone.type != "cuda":
        pytest.skip("torch's class takes this on a GPU only")
    for transport, limit_bytes in ways(alone):
        with large_from(limit_bytes):
            run_case(name, alone, partial(DistributedDataParallel, transport=transport))


def test_without_device_ids(alone):
    run_case("fp32", alone, DistributedDataParallel, device_ids=False)


def test_another_current_device_than_the_models(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    second = torch.device("cuda", 1)
    for transport, limit_bytes in ways(second):
        with large_from(limit_bytes):
            run_case("fp32", second, partial(DistributedDataParallel, transport=transport))
        assert torch.cuda.current_device() == gpu.index


def test_auto_takes_nccl_for_a_model_on_a_gpu(gpu):
    model = torch.nn.Linear(4, 4).to(gpu)
    assert DistributedDataParallel(model).reducer.transport_name == "nccl"
    assert DistributedDataParallel(model, transport="c10d").reducer.transport_name == "c10d"


def test_gradients_are_memory_of_the_bucket(alone):
    """There is no second copy of the gradients."""
    ddp = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).to(alone))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(2, 8, device=alone)).sum().backward()
    gradients = [p.grad for p in ddp.parameters()]
    for bucket in ddp.reducer.plan.buckets:
        begins = {
            gradients[param].data_ptr() - offset * gradients[param].itemsize
            for param, offset in zip(bucket.params, bucket.offsets, strict=True)
        }
        assert len(begins) == 1 and len(bucket.params) > 1


def test_large_gradients_stay_where_autograd_allocated_them(gpu):
    made = {}
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 8)).to(gpu)
    large = model[0].weight
    large.register_post_accumulate_grad_hook(lambda p: made.__setitem__(p, p.grad.data_ptr()))
    ddp = DistributedDataParallel(model)
    for step in range(4):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        ddp(torch.ones(2, 512, device=gpu)).sum().backward()
        assert large.grad.data_ptr() == made[large]
    assert ddp.reducer.bucket_memory_bytes < large.nbytes
    packed = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
    assert packed.reducer.bucket_memory_bytes > large.nbytes


class WeightedSum(torch.nn.Module):
    """A weight whose gradient is forward's argument."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


@pytest.mark.parametrize("divisor", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nccl_scales_large_gradients_as_torch_would(gpu, dtype, divisor):
    """A single rank multiplies too, if the divisor is larger than one."""
    with large_from(LARGE_BYTES):
        ddp = DistributedDataParallel(WeightedSum(1000, dtype).to(gpu), transport="nccl")
    ddp.reducer.set_divisor(lambda: divisor)
    gradient = torch.linspace(-3, 3, 1000, dtype=torch.float64).to(dtype).to(gpu)
    for _ in range(2):
        ddp.zero_grad()
        ddp(gradient).backward()
    assert ddp.reducer.bucket_memory_bytes == 0
    # The product is computed in float, as in torch's kernels, and rounded once.
    torch.testing.assert_close(ddp.module.weight.grad, gradient * (1.0 / divisor), rtol=0, atol=0)
