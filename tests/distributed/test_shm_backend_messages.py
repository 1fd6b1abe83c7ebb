"""Point-to-point operations of the torchddp_shm backend: order, sizes, who waits for whom, and what goes wrong."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import each, on_ranks
from tests.shm_backend import shm_group, stamp
from torchddp import TransportError

# Of bytes: nothing, what travels in a letter, and what does not.
SIZES = [0, 1, 64, 488, 489, 8192, 1_048_577]


@on_ranks(2, 3)
def test_all_send_first_and_receive_then(rank, world_size):
    group = shm_group()
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    for numel in SIZES:
        dist.send(stamp(rank, numel, torch.uint8), after, group=group)
        got = torch.zeros(numel, dtype=torch.uint8)
        assert dist.recv(got, before, group=group) == before
        assert torch.equal(got, stamp(before, numel, torch.uint8))


@on_ranks(2)
def test_order_and_tags(rank):
    # Tags are received in any order, and each tag's messages in their own.
    group = shm_group()
    tags = [5, 0, 9, 5, 0]
    for numel in (3, 5000):
        for place, tag in enumerate(tags):
            dist.send(stamp(rank + place, numel), 1 - rank, group=group, tag=tag)
        for place in (2, 1, 0, 4, 3):
            got = torch.zeros(numel)
            dist.recv(got, 1 - rank, group=group, tag=tags[place])
            assert torch.equal(got, stamp(1 - rank + place, numel))

    # Asynchronous ones are posted and waited for in any order.
    group = shm_group()
    count = 100  # more than a lane has letters
    got = [torch.zeros(i * 30) for i in range(count)]
    receives = [dist.irecv(got[i], 1 - rank, group=group, tag=i % 3) for i in range(count)]
    assert not receives[0].is_completed()
    dist.barrier(group=group)
    sends = [dist.isend(stamp(rank + i, i * 30), 1 - rank, group=group, tag=i % 3) for i in range(count)]
    dist.barrier(group=group)  # the rest leaves while both are in a collective
    for handle in reversed(receives + sends):
        handle.wait()
    for i in range(count):
        assert torch.equal(got[i], stamp(1 - rank + i, i * 30)), i
    later = torch.zeros(4)
    future = dist.irecv(later, 1 - rank, group=group).get_future()
    dist.send(stamp(rank, 4), 1 - rank, group=group)
    assert torch.equal(future.wait()[0], stamp(1 - rank, 4))


@on_ranks(2)
def test_a_message_reaches_its_tensor_though_nobody_waits(rank):
    group = shm_group()
    got = torch.zeros(5000)
    if rank == 0:
        dist.irecv(got, 1, group=group)
        dist.barrier()
        deadline = time.monotonic() + 10
        while not torch.equal(got, stamp(1, 5000)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    else:
        dist.barrier()
        dist.isend(stamp(1, 5000), 0, group=group)


@on_ranks(2)
def test_tensors_of_any_dtype_and_strides(rank):
    for dtype in each([torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.int8]):
        group = shm_group()
        for side in (3, 90):
            whole = stamp(rank, side * side, torch.float32).to(dtype).view(side, side)
            want = stamp(1 - rank, side * side, torch.float32).to(dtype).view(side, side)
            got = torch.zeros(side, side * 2).to(dtype)[:, ::2]
            dist.send(whole.t(), 1 - rank, group=group)
            dist.recv(got, 1 - rank, group=group)
            assert torch.equal(got, want.t())
        weight = nn.Parameter(torch.zeros(10))
        version = weight._version
        dist.send(torch.ones(10), 1 - rank, group=group)
        dist.recv(weight, 1 - rank, group=group)
        assert weight.detach().eq(1).all() and weight._version == version


@on_ranks(4)
def test_from_any_rank_and_within_a_subgroup(rank):
    group = shm_group(ranks=[1, 2, 3])
    if rank == 1:
        sources = set()
        for _ in range(2):
            got = torch.zeros(2000)
            source = dist.recv(got, group=group, tag=1)
            assert torch.equal(got, stamp(source, 2000))
            sources.add(source)
        assert sources == {2, 3}
    elif rank > 1:
        dist.send(stamp(rank, 2000), 1, group=group, tag=1)


@on_ranks(3)
def test_batches_and_objects(rank):
    group = shm_group()
    after, before = (rank + 1) % 3, (rank - 1) % 3
    for numel in (7, 100_000):
        got = torch.zeros(numel)
        handles = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, stamp(rank, numel), after, group), dist.P2POp(dist.irecv, got, before, group)]
        )
        for handle in handles:
            handle.wait()
        assert torch.equal(got, stamp(before, numel))
    dist.send_object_list([rank, "x" * 50_000], after, group=group)
    objects = [None, None]
    assert dist.recv_object_list(objects, before, group=group) == before
    assert objects == [before, "x" * 50_000]


@on_ranks(2)
def test_mistakes_leave_the_group_as_it_was(rank):
    # Sizes that differ are an error with both, and the group goes on.
    group = shm_group()
    for numel in (4, 5000):
        dist.send(torch.ones(numel), 1 - rank, group=group, tag=2)
        with pytest.raises(TransportError, match=rf"rank {rank}: recv of 12 bytes from rank {1 - rank} \(tag 2\) got"):
            dist.recv(torch.zeros(3), 1 - rank, group=group, tag=2)
        dist.send(torch.ones(numel), 1 - rank, group=group, tag=2)
        dist.recv(torch.zeros(numel), 1 - rank, group=group, tag=2)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2

    # Bad arguments.
    group = shm_group()
    backend = group._get_backend(torch.device("cpu"))
    for peer in (rank, 2, -1):
        with pytest.raises(RuntimeError, match=f"send on rank {rank}: rank {peer} is not another rank"):
            backend.send([torch.ones(1)], peer, 0)
    with pytest.raises(RuntimeError, match="takes dense CPU tensors"):
        backend.recv([torch.eye(2).to_sparse()], 1 - rank, 0)
    dist.barrier(group=group)


@pytest.mark.parametrize("how", ["killed", "left"])
@pytest.mark.parametrize("source", [1, None])
@on_ranks(2, needed_ranks=[0])
def test_a_receive_from_who_is_gone_says_so(rank, how, source):
    group = shm_group()
    dist.barrier(group=group)
    if rank == 1:
        dist.send(stamp(1, 3000), 0, group=group)
        dist.send(stamp(1, 3), 0, group=group)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group(group)
        return
    # What was sent is there.
    for numel in (3000, 3):
        got = torch.zeros(numel)
        dist.recv(got, source, group=group)
        assert torch.equal(got, stamp(1, numel))
    start = time.monotonic()
    words = "rank 1 died" if how == "killed" else "rank 1 has left"
    with pytest.raises(TransportError, match=words + r".*recv of 12 bytes"):
        dist.recv(torch.zeros(3), source, group=group)
    assert time.monotonic() - start < 5


@on_ranks(2)
def test_limits_and_aborts_end_a_receive(rank):
    # The group's timeout and an abort end a receive.
    group = shm_group(timeout=timedelta(milliseconds=300))
    if rank == 0:
        with pytest.raises(TransportError, match="timed out after 300 ms in recv of 4 bytes from rank 1"):
            dist.recv(torch.zeros(1), 1, group=group)
    dist.barrier()
    other = shm_group()
    if rank == 0:
        handle = dist.irecv(torch.zeros(1), 1, group=other)
        other._get_backend(torch.device("cpu")).abort()
        with pytest.raises(TransportError, match="rank 0 aborted the process group"):
            handle.wait()
    dist.barrier()

    # A limit of its own ends the wait, not the receive.
    group = shm_group()
    got = torch.zeros(4)
    if rank == 0:
        handle = dist.irecv(got, 1, group=group)
        with pytest.raises(TransportError, match="was not complete 50 ms after"):
            handle.wait(timedelta(milliseconds=50))
        dist.barrier()
        handle.wait()
        assert torch.equal(got, stamp(1, 4))
    else:
        dist.barrier()
        dist.send(stamp(1, 4), 0, group=group)
