"""All-reduces of the torchddp_shm backend too large for a post: in pieces or whole, by each rank or by owners."""

import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.harness import each, on_ranks, run_outcomes, run_ranks
from tests.shm_backend import shm_group, stamp
from torchddp import TransportError

# Of 4 MiB of float32, from which on pieces are used, and with parts of a piece, small ones too, which travel in a slot.
SMALLEST = 1 << 20
WHOLE = 2049  # of float32 it is the least that does not travel in a post
NUMELS = [WHOLE, 70_001, SMALLEST, SMALLEST + 1, SMALLEST + 2 * 262_144 + 4001]

needs_a_processor_each = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="ranks that share one use no pieces"
)


@functools.cache
def noise(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of very different sizes: in another order of summation the result would differ."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator) * 10 ** torch.randint(-3, 4, (numel,), generator=generator)
    return values.to(dtype)


@on_ranks(1, 2, 3)
def test_sums_are_those_of_rank_order(rank, world_size):
    group = shm_group()
    for dtype, numel in each((torch.float32, torch.float64, torch.int64), NUMELS):
        want = sum(noise(r, numel, dtype) for r in range(world_size))
        tensor = noise(rank, numel, dtype).clone()
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, want)
        tensor = noise(rank, numel, dtype).clone()
        dist.all_reduce(tensor, ReduceOp.AVG, group=group)
        rounding = None if dtype.is_floating_point else "trunc"
        assert torch.equal(tensor, want.div(world_size, rounding_mode=rounding))
    maximum = stamp(rank, 100_000, torch.bfloat16)
    dist.all_reduce(maximum, ReduceOp.MAX, group=group)
    assert torch.equal(maximum, torch.stack([stamp(r, 100_000) for r in range(world_size)]).amax(0).bfloat16())


@on_ranks(2)
def test_each_rank_may_call_it_in_its_own_way(rank):
    """Waiting or not, from memory of any kind: then no rank goes by pieces, and the sums are the same."""
    group = shm_group()
    allocate = group._get_backend(torch.device("cpu")).allocate_tensor
    for numel, turn in each([WHOLE, 70_001, SMALLEST + 77], range(2)):
        other = rank == turn
        strided = torch.zeros(numel * 2)[::2] if other else torch.zeros(numel)
        shared = allocate(numel, dtype=torch.float32, device=torch.device("cpu"))
        for tensor in (torch.zeros(numel), strided, shared if other else torch.zeros(numel)):
            is_plain = tensor.is_contiguous() and tensor is not shared
            tensor.copy_(noise(rank, numel))
            handle = dist.all_reduce(tensor, group=group, async_op=other and is_plain)
            if handle is not None:
                handle.wait()
            assert torch.equal(tensor, noise(0, numel) + noise(1, numel))


@needs_a_processor_each
@on_ranks(2)
def test_they_need_no_memory_of_the_tensors_size(rank):
    os.environ["TORCHDDP_SHM_LIMIT_MB"] = "4"
    group = shm_group()
    tensor = stamp(rank, 3_000_000)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, stamp(0, 3_000_000) + stamp(1, 3_000_000))
    with pytest.raises(TransportError, match="no room for 12.* bytes of shared memory"):
        dist.all_reduce(tensor, group=group, async_op=True).wait()


def test_ranks_with_tensors_of_different_sizes_are_told_both():
    def work(rank):
        group = shm_group()
        with pytest.raises(TransportError) as error:
            dist.all_reduce(torch.ones(SMALLEST + rank), group=group)
        return str(error.value)

    texts = run_ranks(work, 2)
    assert any("4194304 bytes" in text and "4194308 bytes" in text for text in texts), texts


def test_a_rank_that_dies_between_pieces_is_named():
    def work(rank):
        group = shm_group()
        tensor = torch.ones(8_000_000)
        dist.all_reduce(tensor, group=group)
        if rank == 1:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(TransportError, match="rank 1 died"):
            while time.monotonic() < start + 20:
                dist.all_reduce(tensor, group=group)
        return True

    outcomes = run_outcomes(work, 2, timeout=40, needed_ranks=[0])
    assert outcomes[0].value is True, outcomes[0].error


@on_ranks(2)
def test_a_handler_that_raises_ends_it_for_all(rank):
    class Enough(Exception):
        pass

    def leave(*_):
        raise Enough

    group = shm_group()
    tensor = torch.ones(SMALLEST)
    if rank == 0:
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Enough):
            dist.all_reduce(tensor, group=group)
    else:
        time.sleep(1)
    with pytest.raises(TransportError, match="rank 0 gave up"):
        dist.all_reduce(tensor, group=group)
