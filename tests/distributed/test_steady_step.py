"""What a steady step does not do: no operator a parameter, no new memory, no new gradient tensors."""

from collections import Counter

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.harness import on_ranks
from torchddp import DistributedDataParallel

LAYERS = 50


class ManySmall(nn.Module):
    """Parameters whose gradients are ready one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def _step(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    model(torch.ones(8)).sum().backward()


def _operators(model: nn.Module) -> Counter:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        _step(model)
    return Counter(event.name for event in prof.events() if event.name.startswith("aten::"))


@on_ranks(2)
def test_no_operator_runs_per_parameter():
    ddp = DistributedDataParallel(ManySmall())
    for _ in range(3):
        _step(ddp)
    local = ManySmall()
    _step(local)
    with_ddp, without = _operators(ddp), _operators(local)
    # The process group itself wraps its one bucket in a few; nothing may grow with the number of parameters.
    assert sum((with_ddp - without).values()) < LAYERS // 2, with_ddp - without


@on_ranks(2)
def test_gradient_tensors_and_buckets_are_those_of_the_step_before():
    ddp = DistributedDataParallel(ManySmall())
    for _ in range(3):
        _step(ddp)
    before = [(id(p.grad), p.grad.data_ptr()) for p in ddp.parameters()]
    gradient_bytes = sum(p.nbytes for p in ddp.parameters())
    memory = ddp.reducer.bucket_memory_bytes
    for _ in range(3):
        _step(ddp)
        assert [(id(p.grad), p.grad.data_ptr()) for p in ddp.parameters()] == before
    assert ddp.reducer.bucket_memory_bytes == memory == gradient_bytes


@on_ranks(1)
def test_no_torch_memory_is_allocated_beyond_the_local_step():
    def allocations(model):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            _step(model)
        return sum(
            1 for event in prof.profiler.kineto_results.events() if event.name() == "[memory]" and event.nbytes() > 0
        )

    ddp, local = DistributedDataParallel(ManySmall()), ManySmall()
    for _ in range(3):
        _step(ddp)
        _step(local)
    assert allocations(ddp) <= allocations(local)


@on_ranks(1)
def test_a_failed_view_is_replaced_when_the_user_repoints_a_gradient():
    ddp = DistributedDataParallel(ManySmall())
    for _ in range(3):
        _step(ddp)
    for p in ddp.parameters():
        p.grad.data = torch.zeros(8)  # re-points the tensor that the bucket slot handed out
    for _ in range(2):
        _step(ddp)
    reference = ManySmall()
    _step(reference)
    for p, q in zip(ddp.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
