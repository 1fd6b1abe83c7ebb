"""What the torchddp_shm backend passes to gloo: messages, collectives that give each rank its own, and reductions."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from tests.harness import each, on_ranks
from tests.shm_backend import shm_group, stamp
from torchddp import TransportError


def exchange(group: dist.ProcessGroup, mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:
    """Send and receive at once; gloo's sends wait for their receives."""
    for handle in (dist.isend(mine, peer, group=group), dist.irecv(theirs, peer, group=group)):
        handle.wait()


@on_ranks(2)
def test_messages_by_order_and_tag(rank):
    group = shm_group()
    tags = [5, 0, 9, 5, 0]
    for numel in (0, 3, 5000):
        got = [torch.zeros(numel) for _ in tags]
        handles = [dist.isend(stamp(rank + i, numel), 1 - rank, group=group, tag=tag) for i, tag in enumerate(tags)]
        for place in (2, 1, 0, 4, 3):
            handles.append(dist.irecv(got[place], 1 - rank, group=group, tag=tags[place]))
        for handle in reversed(handles):
            handle.wait()
            assert handle.is_completed() and handle.is_success()
        # Messages with one tag come in their order, and 1 was asked for before 4, 0 before 3.
        for place in range(5):
            assert torch.equal(got[place], stamp(1 - rank + place, numel))
    dist.barrier(group=group)

    later = torch.zeros(4)
    batched = [(dist.isend, stamp(rank, 4)), (dist.irecv, later)]
    for handle in dist.batch_isend_irecv([dist.P2POp(call, tensor, 1 - rank, group) for call, tensor in batched]):
        handle.wait()
    assert torch.equal(later, stamp(1 - rank, 4))
    objects = [None, None]
    for sender in range(2):
        if rank == sender:
            dist.send_object_list([rank, "x" * 50_000], 1 - rank, group=group)
        else:
            assert dist.recv_object_list(objects, sender, group=group) == sender
            assert objects == [sender, "x" * 50_000]


@on_ranks(2)
def test_messages_of_any_dtype_and_strides(rank):
    group = shm_group()
    for dtype in each([torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.uint16, torch.int8]):
        for side in (3, 90):
            whole = stamp(rank, side * side, torch.float32).to(dtype).view(side, side)
            want = stamp(1 - rank, side * side, torch.float32).to(dtype).view(side, side)
            got = torch.zeros(side, side * 2).to(dtype)[:, ::2]
            exchange(group, whole.t(), got, 1 - rank)
            assert torch.equal(got, want.t())
        weight = nn.Parameter(torch.zeros(10))
        version = weight._version
        exchange(group, torch.ones(10), weight, 1 - rank)
        assert weight.detach().eq(1).all() and weight._version == version


@on_ranks(4)
def test_messages_from_any_rank_of_a_subgroup(rank):
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
    dist.barrier()  # rank 0 must stay until the others have connected


@on_ranks(3)
def test_only_the_two_ranks_of_a_message_call_anything(rank):
    group = shm_group()
    got = torch.zeros(10)
    if rank == 0:
        dist.send(stamp(0, 10), 1, group=group)
    elif rank == 1:
        dist.recv(got, 0, group=group)
        assert torch.equal(got, stamp(0, 10))
    dist.barrier()


@on_ranks(3)
def test_reductions_that_the_kernels_lack(rank):
    group = shm_group()
    inputs = [stamp(r, 6) for r in range(3)]
    product = inputs[0] * inputs[1] * inputs[2]
    whole = torch.zeros(12)
    strided = whole[::2].copy_(inputs[rank])
    handle = dist.all_reduce(strided, ReduceOp.PRODUCT, group=group, async_op=True)
    assert torch.equal(handle.get_future().wait()[0], product) and handle.is_completed()
    assert torch.equal(strided, product) and whole[1::2].eq(0).all()
    pair = [inputs[rank].clone(), inputs[rank].clone()]
    dist.all_reduce_coalesced(pair, ReduceOp.PRODUCT, group=group)
    assert all(torch.equal(tensor, product) for tensor in pair)
    tensor = inputs[rank].clone()
    dist.reduce(tensor, 1, ReduceOp.PRODUCT, group=group)
    assert torch.equal(tensor, product if rank == 1 else inputs[rank])
    out = torch.zeros(2)
    for call in (
        lambda: dist.reduce_scatter_tensor(out, inputs[rank], ReduceOp.PRODUCT, group=group),
        lambda: dist.reduce_scatter(out, list(inputs[rank].split(2)), ReduceOp.PRODUCT, group=group),
    ):
        out.zero_()
        call()
        assert torch.equal(out, product[rank * 2 : rank * 2 + 2])
    bits = torch.tensor([0b1110, 0b0111, 0b1111])[rank : rank + 1]
    dist.all_reduce(bits, ReduceOp.BAND, group=group)
    assert bits.item() == 0b0110


@on_ranks(2)
def test_the_groups_timeout_names_the_operation(rank):
    for name, call in (
        ("recv", lambda group: dist.recv(torch.zeros(1), 1, group=group)),
        ("gather", lambda group: dist.gather(torch.zeros(1), [torch.zeros(1)] * 2, 0, group=group)),
    ):
        group = shm_group(timeout=timedelta(seconds=5))
        if rank == 0:
            with pytest.raises(TransportError, match=f"{name} on rank 0 over gloo failed: .*[Tt]imed out"):
                call(group)
        dist.barrier()


@on_ranks(2)
def test_an_abort_ends_the_wait_for_a_collective(rank):
    group = shm_group()
    if rank == 0:
        handle = dist.scatter(torch.zeros(1), None, 1, group=group, async_op=True)
        group._get_backend(torch.device("cpu")).abort()
        with pytest.raises(TransportError, match="rank 0 aborted the process group"):
            handle.wait()
    dist.barrier()
    if rank == 1:
        dist.scatter(torch.zeros(1), [torch.ones(1)] * 2, 1, group=group)  # so that gloo has nothing left to do
    dist.barrier()


@pytest.mark.parametrize("what", ["recv", "gather"])
@on_ranks(2, needed_ranks=[0])
def test_a_dead_rank_ends_what_waits_for_it(rank, what):
    group = shm_group()
    dist.barrier(group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError, match=f"{what} on rank 0 over gloo failed: .*(?:closed|reset) by peer"):
        if what == "recv":
            dist.recv(torch.zeros(3), 1, group=group)
        else:
            dist.gather(torch.zeros(3), [torch.zeros(3)] * 2, 0, group=group)


@on_ranks(2)
def test_mistakes_leave_the_group_as_it_was(rank):
    group = shm_group()
    backend = group._get_backend(torch.device("cpu"))
    for peer in (rank, 2, -1):
        with pytest.raises(RuntimeError, match=f"send on rank {rank}: rank {peer} is not another rank"):
            backend.send([torch.ones(1)], peer, 0)
    with pytest.raises(RuntimeError, match="supports only dense CPU tensors"):
        backend.recv([torch.eye(2).to_sparse()], 1 - rank, 0)
    with pytest.raises(TransportError, match=f"all_reduce on rank {rank} over gloo failed: Invalid scalar type"):
        dist.all_reduce(torch.ones(2, dtype=torch.uint16), group=group)
    got = torch.zeros(3)
    exchange(group, stamp(rank, 3), got, 1 - rank)
    assert torch.equal(got, stamp(1 - rank, 3))
