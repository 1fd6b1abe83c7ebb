"""A steady step runs no operator per parameter and allocates no memory or gradient tensors."""

from collections import Counter

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.harness import on_ranks
from torchddp import DistributedDataParallel

LAYERS = 50


def many_small():
    """Many small parameters, whose gradients become ready one after the other."""
    return nn.Sequential(*(nn.RMSNorm(8) for _ in range(LAYERS)))


def _steps(model, count=3):
    for _ in range(count):
        model.zero_grad(set_to_none=True)
        model(torch.ones(8)).sum().backward()
    return model


def _recorded(model):
    """torch's operators and the number of allocations in a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        _steps(model, 1)
    events = prof.profiler.kineto_results.events()
    allocated = sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)
    return Counter(event.name for event in prof.events() if event.name.startswith("aten::")), allocated


@on_ranks(1, 2)
def test_operators_memory_and_gradients_of_a_steady_step(world_size):
    ddp, local = _steps(DistributedDataParallel(many_small())), _steps(many_small())
    (with_ddp, allocated), (without, allocated_without) = _recorded(ddp), _recorded(local)
    # The process group runs a few for its one bucket; nothing may grow with the number of parameters.
    assert sum((with_ddp - without).values()) < LAYERS // 2, with_ddp - without
    assert world_size > 1 or allocated <= allocated_without

    # Gradient tensors and buckets are reused from the previous step.
    for model in (ddp, _steps(DistributedDataParallel(many_small(), transport="c10d"))):
        before = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
        memory = model.reducer.bucket_memory_bytes
        for _ in range(3):
            _steps(model, 1)
            assert [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()] == before
        assert model.reducer.bucket_memory_bytes == memory == sum(p.nbytes for p in model.parameters())
