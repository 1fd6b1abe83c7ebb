"""Large CPU gradients, which are reduced in their own memory instead of being copied into a bucket.

Over shared memory that means that autograd allocates them there.
"""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import on_ranks
from torchddp import DistributedDataParallel as AnyDDP

DistributedDataParallel: Any = None  # over the transport of the test


@pytest.fixture(params=["c10d", "shm"], autouse=True)
def transport(request):
    global DistributedDataParallel
    DistributedDataParallel = functools.partial(AnyDDP, transport=request.param)
    return request.param


LARGE = 300_000  # float32 elements: above the 1 MiB from which a gradient has a bucket of its own


class Mixed(nn.Module):
    """Two large parameters with small ones around them; one of the large ones may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(7))
        self.large = nn.Parameter(torch.randn(LARGE))
        self.other = nn.Parameter(torch.randn(3, LARGE // 3).t())
        self.last = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, use_other: bool = True) -> torch.Tensor:
        y = self.first.sum() * x + (self.large * x).sin().sum() + self.last.prod()
        return y + (self.other * x).cos().sum() if use_other else y


def _run(model: nn.Module, rank: int, steps: int, *, set_to_none: bool = True, accumulate: int = 1) -> list:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(accumulate - 1):
            with model.no_sync():
                model(torch.tensor(0.1 * (rank + step + part + 1))).backward()
        model(torch.tensor(0.3 * (rank + 1) + step)).backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return seen


@on_ranks(1, 2)
def test_equal_to_torch(rank):
    for how in ({}, {"set_to_none": False}, {"accumulate": 3}):
        theirs = _run(TorchDDP(Mixed()), rank, 3, **how)
        ours = _run(DistributedDataParallel(Mixed()), rank, 3, **how)
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                assert torch.equal(x, y) and x.stride() == y.stride(), f"{how}, step {step}, parameter {i}"


@on_ranks(2)
def test_the_gradient_is_the_tensor_that_autograd_made(rank):
    ddp = DistributedDataParallel(Mixed())
    made = {}
    ddp.module.large.register_post_accumulate_grad_hook(lambda p: made.update(large=p.grad.data_ptr()))
    ddp.module.first.register_post_accumulate_grad_hook(lambda p: made.update(first=p.grad.data_ptr()))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor(1.0)).backward()
    assert ddp.module.large.grad.data_ptr() == made["large"]  # not copied
    assert ddp.module.first.grad.data_ptr() != made["first"]  # small: copied into a bucket


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_unused_large_parameters(rank, options):
    ours, theirs = DistributedDataParallel(Mixed(), **options), TorchDDP(Mixed(), **options)
    dynamic = "find_unused_parameters" in options
    for step in range(4):
        use_other = dynamic and (step + rank) % 2 == 0
        for model in (ours, theirs):
            model.zero_grad(set_to_none=step % 2 == 0)
            model(torch.tensor(1.0 + rank + step), use_other).backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("order", ["param_first", "param_last"])
@on_ranks(2)
def test_memory_that_another_branch_still_reads_is_left_alone(rank, order):
    """One gradient tensor flows to a parameter (through a view) and to another branch: autograd shares its memory."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.position = nn.Parameter(torch.randn(300, 1000))
            self.scale = nn.Parameter(torch.randn(1000))
            self.other = nn.Parameter(torch.randn(1, 300, 1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = x * self.scale
            position = self.position.unsqueeze(0)
            mixed = scaled + position if order == "param_last" else position + scaled
            return (mixed + self.other).sin()

    ours, theirs = DistributedDataParallel(Shared()), TorchDDP(Shared())
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(1, 300, 1000)) * torch.randn(1, 300, 1000)).sum().backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (step, name)


@on_ranks(1)
def test_own_bucket_sizes_turn_it_off(rank):
    assert len(DistributedDataParallel(Mixed()).reducer.plan) == 3
    assert len(DistributedDataParallel(Mixed(), bucket_cap_mb=25).reducer.plan) == 1
