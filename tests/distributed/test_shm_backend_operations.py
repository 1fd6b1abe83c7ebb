"""Operations of the torchddp_shm backend: handles, all-reduces too large for a slot, point-to-point messages."""

import functools
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.harness import each, gathered, on_ranks
from tests.shm_backend import shm_group, stamp
from tests.unit.helpers import wait_until
from torchddp import TransportError

in_posts_and_not = pytest.mark.parametrize("numel", [10, 50_000])


@in_posts_and_not
@on_ranks(2)
def test_operations_overlap_and_are_waited_for_in_any_order(rank, numel):
    group = shm_group()
    want = [stamp(0, numel + i) + stamp(1, numel + i) for i in range(100)]  # more than may be in flight at once
    tensors = [stamp(rank, numel + i) for i in range(100)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    for handle in reversed(works):
        assert handle.wait() and handle.is_completed() and handle.is_success()
    assert all(torch.equal(t, w) for t, w in zip(tensors, want, strict=True))
    for handle in works:
        handle.wait()  # again
    tensor = stamp(rank, numel)
    handle = dist.all_reduce(tensor, group=group, async_op=True)
    while not handle.is_completed():
        time.sleep(0.001)
    assert torch.equal(tensor, want[0])


@in_posts_and_not
@on_ranks(2)
def test_futures_complete_without_a_wait(rank, numel):
    group = shm_group()
    tensors = [stamp(rank, numel + i) for i in range(5)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    futures = [handle.get_future().then(lambda f: f.value()[0].sum().item()) for handle in works]
    for i in reversed(range(5)):
        assert futures[i].wait() == (stamp(0, numel + i) + stamp(1, numel + i)).sum().item()
    done = dist.all_reduce(tensors[0], group=group, async_op=True)
    done.wait()
    assert torch.equal(done.get_future().wait()[0], tensors[0]) and done.get_future().done()
    assert torch.equal(done.result()[0], tensors[0])
    handle = dist.all_gather([torch.zeros(numel) for _ in range(2)], stamp(rank, numel), group, async_op=True)
    assert torch.equal(handle.get_future().wait()[1], stamp(1, numel))
    assert dist.barrier(group=group, async_op=True).get_future().wait() == []


@on_ranks(2)
def test_futures_requested_while_others_are_freed(rank):
    """The thread that frees a Future with a Python callback waits for the GIL, which the next request holds."""
    group = shm_group()
    sums = []
    for i in range(2000):
        tensor = stamp(rank, 50_000 if i % 8 == 0 else 10)
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        future.then(lambda f: sums.append(f.value()[0][1].item()))
        del tensor, future
    dist.barrier(group=group)
    wait_until(lambda: len(sums) == 2000)
    assert sums == [(stamp(0, 10) + stamp(1, 10))[1].item()] * 2000


@pytest.mark.rest_is_thorough("10")
@in_posts_and_not
@on_ranks(3)
def test_no_rank_hangs_if_another_never_waits(rank, numel):
    """Rank 0 drops its handles and keeps computing; the others need its part of the work."""
    group = shm_group()
    parts = [torch.zeros(numel) for _ in range(3)]
    handle = dist.all_gather(parts, stamp(rank, numel), group=group, async_op=True)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        del handle
        store.wait(["rank 1 goes on", "rank 2 goes on"])
    else:
        handle.wait()
        store.set(f"rank {rank} goes on", "")
    assert all(torch.equal(parts[r], stamp(r, numel)) for r in range(3))
    tensor = stamp(rank, numel)
    dist.all_reduce(tensor, group=group, async_op=True)
    dist.destroy_process_group(group)  # completes it
    assert torch.equal(tensor, sum(stamp(r, numel) for r in range(3)))


@pytest.mark.parametrize("name", ["ALLREDUCE", "SCATTER"])
@on_ranks(2)
def test_a_timeout_of_wait_does_not_end_the_operation(rank, name):
    group = shm_group()
    tensor = stamp(rank, 10)

    def begin():
        if name == "ALLREDUCE":
            return dist.all_reduce(tensor, group=group, async_op=True)
        parts = [stamp(1, 10)] * 2 if rank == 1 else None
        return dist.scatter(tensor, parts, 1, group=group, async_op=True)

    if rank == 0:
        handle = begin()
        with pytest.raises(TransportError, match=f"rank 0: {name} was not complete 100 ms after"):
            handle.wait(timedelta(milliseconds=100))
        assert not handle.is_completed()
    dist.barrier()
    if rank == 1:
        handle = begin()
    handle.wait()
    assert torch.equal(tensor, stamp(1, 10) + (stamp(0, 10) if name == "ALLREDUCE" else 0))


@pytest.mark.parametrize("how", ["wait", "future"])
@on_ranks(2)
def test_the_groups_timeout_is_kept(rank, how):
    group = shm_group(timeout=timedelta(seconds=5))
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"timed out after 5000 ms in all_reduce of 40 bytes.*rank 1"):
            handle = dist.all_reduce(torch.ones(10), group=group, async_op=True)
            handle.wait() if how == "wait" else handle.get_future().wait()
    dist.barrier()
    with pytest.raises(TransportError, match="rank 0 gave up|timed out"):
        for _ in range(2):  # rank 0's input to the first is there
            dist.all_reduce(torch.ones(10), group=group)


@pytest.mark.parametrize("how", ["wait", "future"])
@on_ranks(2, needed_ranks=[0])
def test_a_dead_rank_is_named(rank, how):
    group = shm_group()
    dist.barrier(group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1 died"):
        handle = dist.all_reduce(torch.ones(50_000), group=group, async_op=True)
        handle.wait() if how == "wait" else handle.get_future().wait()


# float32 sizes from 4 MiB, where pieces start, also with partial pieces, some small enough for a slot.
SMALLEST = 1 << 20
WHOLE = 2049  # the smallest float32 message that doesn't fit a slot
NUMELS = [WHOLE, 70_001, SMALLEST, SMALLEST + 1, SMALLEST + 2 * 262_144 + 4001]


@functools.cache
def noise(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers of very different magnitudes: another summation order would change the result."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator) * 10 ** torch.randint(-3, 4, (numel,), generator=generator)
    return values.to(dtype)


@on_ranks(1, 2, 3)
def test_sums_are_in_rank_order(rank, world_size):
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


@on_ranks(2)
def test_ranks_may_call_it_in_different_ways(rank):
    """Waiting or not, with memory of any kind: then no rank uses pieces, and the sums are the same."""
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


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="ranks that share a processor use no pieces")
@on_ranks(2)
def test_they_need_no_memory_of_the_tensors_size(rank):
    os.environ["TORCHDDP_SHM_LIMIT_MB"] = "4"
    group = shm_group()
    tensor = stamp(rank, 3_000_000)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, stamp(0, 3_000_000) + stamp(1, 3_000_000))
    with pytest.raises(TransportError, match="no room for 12.* bytes of shared memory"):
        dist.all_reduce(tensor, group=group, async_op=True).wait()


@on_ranks(2)
def test_errors_of_different_sizes_name_both(rank):
    group = shm_group()
    with pytest.raises(TransportError) as error:
        dist.all_reduce(torch.ones(SMALLEST + rank), group=group)
    texts = gathered(str(error.value))
    assert any("4194304 bytes" in text and "4194308 bytes" in text for text in texts), texts


@on_ranks(2, needed_ranks=[0])
def test_a_rank_that_dies_between_pieces_is_named(rank):
    group = shm_group()
    tensor = torch.ones(8_000_000)
    dist.all_reduce(tensor, group=group)
    if rank == 1:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(TransportError, match="rank 1 died"):
        while True:
            dist.all_reduce(tensor, group=group)
