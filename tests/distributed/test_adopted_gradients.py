"""Large CPU gradients, which are reduced in their own memory instead of being copied into a bucket.

Over shared memory autograd allocates them in the segment; other tensors may land there too.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import each, in_child, on_ranks, status_bytes
from tests.models import after_backward_of, assert_grads, gradients_made, grads_of, linears
from torchddp import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("cheap_messages")

TRANSPORTS = ["c10d", "shm"]
WIDTH = 512  # a weight of 1 MiB: large enough for its own bucket
MIB = 1024 * 1024
_layers = partial(linears, width=WIDTH, bias=False)


def _in_segment(tensor: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:torchddp" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= tensor.data_ptr() < end:
                return True
    return False


def _step(ddp: nn.Module) -> None:
    ddp.zero_grad()
    ddp(torch.randn(3, WIDTH)).sum().backward()


@on_ranks(2)
def test_the_gradient_is_the_tensor_that_autograd_allocated(rank):
    for transport in each(TRANSPORTS):
        module = nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
        ddp = DistributedDataParallel(module, transport=transport)
        assert len(ddp.reducer.plan) == 2
        made = gradients_made(module)
        for _ in range(3):
            _step(ddp)
        assert [p.grad.data_ptr() == made[name] for name, p in module.named_parameters()] == [False] * 4 + [True]
        # Explicit bucket sizes turn it off.
        assert len(DistributedDataParallel(module, transport=transport, bucket_cap_mb=25).reducer.plan) == 1


class Shared(nn.Module):
    """One gradient goes to a parameter (through a view) and to another branch: autograd shares its memory."""

    def __init__(self, param_last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.param_last = param_last
        self.position = nn.Parameter(torch.randn(300, 1000))
        self.scale = nn.Parameter(torch.randn(1000))
        self.other = nn.Parameter(torch.randn(1, 300, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled, position = x * self.scale, self.position.unsqueeze(0)
        return ((scaled + position if self.param_last else position + scaled) + self.other).sin()


@on_ranks(2)
def test_memory_that_another_branch_still_reads_is_not_reduced(rank):
    for transport, param_last in each(TRANSPORTS, [False, True]):
        ours = DistributedDataParallel(Shared(param_last), transport=transport)
        theirs = TorchDDP(Shared(param_last))
        for step in range(4):
            for model in (ours, theirs):
                model.zero_grad()
                torch.manual_seed(10 * step + rank)
                (model(torch.randn(1, 300, 1000)) * torch.randn(1, 300, 1000)).sum().backward()
            assert_grads(grads_of(ours), grads_of(theirs), 0, f"step {step}:")


@on_ranks(2)
def test_large_gradients_are_allocated_in_the_segment(rank):
    ddp = DistributedDataParallel(_layers(4), transport="shm")
    born = {}
    for name, p in ddp.module.named_parameters():
        p.register_hook(lambda grad, name=name: born.update({name: _in_segment(grad)}))
    for _ in range(4):
        _step(ddp)
        assert born == dict.fromkeys(dict(ddp.module.named_parameters()), True)
        assert all(_in_segment(p.grad) for p in ddp.parameters())
        # Some operators call the allocator directly and free memory by address only.
        ddp(torch.randn(64, WIDTH)).sort(dim=0).values.cumsum(0).sum().backward()
        torch.linalg.svd(torch.randn(128, 128))
    # Nothing is allocated there outside of backward.
    assert not _in_segment(torch.empty(WIDTH, WIDTH))
    with torch.no_grad():
        ddp(torch.randn(3, WIDTH))
    assert not _in_segment(torch.empty(WIDTH, WIDTH))


@on_ranks(2)
def test_other_tensors_of_the_same_size_behave_normally(rank):
    """The user keeps a tensor of a gradient's size made in backward: nothing may overwrite it."""
    kept: list[torch.Tensor] = []
    ddp = DistributedDataParallel(_layers(2), transport="shm")
    for step in range(12):
        ddp.zero_grad()
        output = ddp(torch.randn(3, WIDTH))
        output.register_hook(lambda _: kept.append(torch.full((WIDTH, WIDTH), float(len(kept)))))
        (output * (step + rank)).sum().backward()
    assert _in_segment(kept[0])  # the pool can't tell it from a gradient
    assert not _in_segment(kept[-1])  # and it has only a few spare blocks
    for i, tensor in enumerate(kept):
        assert torch.equal(tensor, torch.full((WIDTH, WIDTH), float(i)))
    del ddp
    assert torch.equal(kept[0], torch.zeros(WIDTH, WIDTH))


@on_ranks(2)
def test_memory_is_bounded_and_freed_with_the_model(rank):
    before = status_bytes("RssShmem")
    ddp = DistributedDataParallel(_layers(8), transport="shm")
    gradient_bytes = sum(p.nbytes for p in ddp.parameters())
    for _ in range(20):
        _step(ddp)
    # The mapped pages of this rank and its peer: the gradients, up to three spare blocks, and the header.
    assert status_bytes("RssShmem") - before <= 2 * (gradient_bytes + 3 * MIB + MIB)
    del ddp
    assert status_bytes("RssShmem") - before < MIB


@on_ranks(2)
def test_a_child_forked_in_backward_gets_no_pool_memory(rank):
    """It would write to memory that its parent and the parent's peers consider free."""
    ddp = DistributedDataParallel(_layers(4), transport="shm")
    ddp(torch.randn(3, WIDTH)).sum().backward()
    ended = []

    def fork():
        lent = torch.empty(WIDTH, WIDTH)
        assert _in_segment(lent)  # the pool is active

        def allocate():
            nonlocal lent
            fresh = [torch.empty(WIDTH, WIDTH) for _ in range(4)]
            del lent  # it belongs to the parent, so the pool doesn't reuse it
            fresh.append(torch.empty(WIDTH, WIDTH))
            assert not any(map(_in_segment, fresh))

        ended.append(in_child(allocate))

    after_backward_of(ddp.module[2], fork)
    _step(ddp)
    assert ended == [True]
    assert all(_in_segment(p.grad) for p in ddp.parameters())


@on_ranks(2, 3)
def test_a_rank_that_copies_and_one_that_does_not_agree(rank, world_size):
    """Gradients in the segment are scaled in the sum, others while packing, with bitwise equal results."""

    def backward(model, r, step):
        torch.manual_seed(10 * step + r)
        model.zero_grad()
        model(torch.randn(3, WIDTH)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    ddp, plain = DistributedDataParallel(_layers(4), transport="shm"), _layers(4)
    if rank == 0:
        for p in ddp.parameters():  # a hook that replaces the gradient with one in ordinary memory
            p.register_hook(lambda g: torch.from_numpy(g.clone().numpy().copy()))
    for step in range(3):
        want = [torch.zeros_like(p) for p in plain.parameters()]
        for r in range(world_size):
            for total, grad in zip(want, backward(plain, r, step), strict=True):
                total += grad * (1 / world_size)
        assert all(map(torch.equal, backward(ddp, rank, step), want))
