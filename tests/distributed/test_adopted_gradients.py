"""Large CPU gradients, which are reduced in their own memory instead of being copied into a bucket.

Over shared memory that means that autograd allocates them there.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import each, on_ranks
from tests.models import assert_grads, grads_of
from torchddp import DistributedDataParallel

over_both = pytest.mark.parametrize("transport", ["c10d", "shm"])
LARGE = 300_000  # float32 elements: above the 1 MiB from which a gradient has a bucket of its own


class Mixed(nn.Module):
    """Two large parameters with small ones around them; one of the large ones may stay unused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(7))
        self.large = nn.Parameter(torch.randn(LARGE))
        self.other = nn.Parameter(torch.randn(3, LARGE // 3).t())
        self.last = nn.Parameter(torch.randn(5))

    def forward(self, x, use_other=True):
        y = self.first.sum() * x + (self.large * x).sin().sum() + self.last.prod()
        return y + (self.other * x).cos().sum() if use_other else y


@over_both
@on_ranks(2)
def test_the_gradient_is_the_tensor_that_autograd_made(transport):
    ddp = DistributedDataParallel(Mixed(), transport=transport)
    made = {}
    ddp.module.large.register_post_accumulate_grad_hook(lambda p: made.update(large=p.grad.data_ptr()))
    ddp.module.first.register_post_accumulate_grad_hook(lambda p: made.update(first=p.grad.data_ptr()))
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor(1.0)).backward()
    assert ddp.module.large.grad.data_ptr() == made["large"]  # not copied
    assert ddp.module.first.grad.data_ptr() != made["first"]  # small: copied into a bucket


@over_both
@on_ranks(1, 2)
def test_equal_to_torch(rank, transport):
    for options in each([{}, {"find_unused_parameters": True}, {"static_graph": True}]):
        ours, theirs = DistributedDataParallel(Mixed(), transport=transport, **options), TorchDDP(Mixed(), **options)
        for step in range(4):
            for model in (ours, theirs):
                model.zero_grad(set_to_none=step % 2 == 0)
                if options == {} and step != 1:
                    with model.no_sync():
                        model(torch.tensor(0.1 * (rank + step + 1))).backward()
                use_other = options == {} or ("static_graph" not in options and (step + rank) % 2 == 0)
                model(torch.tensor(1.0 + rank + step), use_other).backward()
            torch.testing.assert_close(grads_of(ours), grads_of(theirs), rtol=0, atol=0, check_stride=True)


@over_both
@pytest.mark.parametrize("order", ["param_first", "param_last"])
@on_ranks(2)
def test_memory_that_another_branch_still_reads_is_left_alone(rank, transport, order):
    """One gradient tensor flows to a parameter (through a view) and to another branch: autograd shares its memory."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.position = nn.Parameter(torch.randn(300, 1000))
            self.scale = nn.Parameter(torch.randn(1000))
            self.other = nn.Parameter(torch.randn(1, 300, 1000))

        def forward(self, x):
            scaled = x * self.scale
            position = self.position.unsqueeze(0)
            mixed = scaled + position if order == "param_last" else position + scaled
            return (mixed + self.other).sin()

    ours, theirs = DistributedDataParallel(Shared(), transport=transport), TorchDDP(Shared())
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            torch.manual_seed(10 * step + rank)
            (model(torch.randn(1, 300, 1000)) * torch.randn(1, 300, 1000)).sum().backward()
        assert_grads(grads_of(ours), grads_of(theirs), 0, f"step {step}:")


@over_both
@on_ranks(1)
def test_own_bucket_sizes_turn_it_off(transport):
    assert len(DistributedDataParallel(Mixed(), transport=transport).reducer.plan) == 3
    assert len(DistributedDataParallel(Mixed(), transport=transport, bucket_cap_mb=25).reducer.plan) == 1
