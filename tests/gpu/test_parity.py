"""One rank on a GPU over NCCL: the same gradients and weights as torch's class, bit for bit."""

from functools import partial

import pytest
import torch

from tests.gpu.cases import CASES, run_case
from torchddp import _C, DistributedDataParallel


def transports(device: torch.device) -> tuple[str, ...]:
    return ("nccl", "c10d") if device.type == "cuda" else ("c10d",)


@pytest.mark.parametrize("name", CASES)
def test_same_as_torch(alone, name):
    if CASES[name].gpu_only and alone.type != "cuda":
        pytest.skip("torch's class takes this on a GPU only")
    for transport in transports(alone):
        run_case(name, alone, 0, partial(DistributedDataParallel, transport=transport))


def test_the_extension_is_the_cuda_build(gpu):
    assert _C.with_cuda


def test_without_device_ids(alone):
    run_case("fp32", alone, 0, DistributedDataParallel, device_ids=False)


def test_auto_takes_nccl_for_a_model_on_a_gpu(gpu):
    model = torch.nn.Linear(4, 4).to(gpu)
    assert DistributedDataParallel(model).reducer.transport_name == "nccl"
    assert DistributedDataParallel(model, transport="c10d").reducer.transport_name == "c10d"


def test_gradients_are_memory_of_the_bucket(alone):
    """No second copy of the gradients is kept."""
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
