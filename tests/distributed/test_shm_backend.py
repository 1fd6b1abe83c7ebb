"""The torchddp_shm backend of torch.distributed: each collective compared with gloo, and errors."""

import gc
import os
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import assert_each_raises, each, on_ranks
from tests.shm_backend import BACKEND, shm_group, stamp
from torchddp import _C, DistributedDataParallel, Precision, TransportError

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int8, torch.uint8]
# One element, an odd number, both sides of the slot size, several chunks.
NUMELS = [1, 7, 1000, 5000, 70_001]
SUM, MAX, MIN, PRODUCT, AVG = ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.AVG


def both(group: dist.ProcessGroup, call, *tensors: torch.Tensor) -> None:
    """Run `call(group, *tensors)` over gloo and over shared memory; all tensors must end equal."""
    # gloo lacks bool, and complex numbers in some collectives; these values are integers.
    known = torch.float64 if tensors[0].dtype in (torch.bool, torch.complex64) else None
    expected = [t.clone() if known is None else t.real.to(known) for t in tensors]
    call(None, *expected)
    call(group, *tensors)
    for got, want in zip(tensors, expected, strict=True):
        assert torch.equal(got.to_dense(), want.to_dense().to(got.dtype)), (got, want)


@on_ranks(1, 3)
def test_all_reduce(rank, world_size):
    group = shm_group()
    for dtype, numel, op in each(DTYPES, NUMELS, (SUM, PRODUCT, MIN, MAX)):
        if (op, dtype) != (PRODUCT, torch.int8):  # overflows
            both(group, lambda g, t, op=op: dist.all_reduce(t, op, group=g), stamp(rank, numel, dtype))
    # gloo has no AVG.
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        tensor = stamp(rank, 5000, dtype)
        dist.all_reduce(tensor, AVG, group=group)
        total = sum(stamp(r, 5000, dtype) for r in range(world_size))
        assert torch.equal(tensor, total.div(world_size) if dtype.is_floating_point else total // world_size)


@on_ranks(1, 3)
def test_collectives_that_move(rank, world_size):
    def gather(root):
        return lambda g, t, *out: dist.gather(t, list(out) if rank == root else None, root, group=g)

    def scatter(root):
        return lambda g, t, *of: dist.scatter(t, list(of) if rank == root else None, root, group=g)

    def all_to_all(g, *tensors):
        dist.all_to_all(list(tensors[:world_size]), list(tensors[world_size:]), group=g)

    group = shm_group()
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, world_size)
    for numel, dtype in each([0, *NUMELS], (torch.float32, torch.int8, torch.bool, torch.complex64, torch.float16)):
        mine = stamp(rank, numel, dtype)
        parts = [torch.zeros(numel, dtype=dtype) for _ in range(world_size)]
        whole = torch.zeros(numel * world_size, dtype=dtype)
        pieces = [stamp(rank + r, numel, dtype) for r in range(world_size)]
        for root in range(world_size):
            both(group, lambda g, t, root=root: dist.broadcast(t, root, group=g), mine.clone())
            both(group, gather(root), mine, *parts)
            both(group, scatter(root), mine.clone(), *pieces)
        both(group, lambda g, t, *out: dist.all_gather(list(out), t, group=g), mine, *parts)
        both(group, lambda g, t, out: dist.all_gather_into_tensor(out, t, group=g), mine, whole.clone())
        both(group, all_to_all, *parts, *pieces)
        both(group, lambda g, out, t: dist.all_to_all_single(out, t, group=g), whole.clone(), torch.cat(pieces))


@on_ranks(1, 3)
def test_collectives_that_reduce_to_one(rank, world_size):
    group = shm_group()
    for numel, op in each(NUMELS, (SUM, MAX)):
        for root in range(world_size):
            tensor = stamp(rank, numel)
            dist.reduce(tensor, root, op, group=group)
            want = stamp(rank, numel)  # unchanged on other ranks
            if rank == root:
                stack = torch.stack([stamp(r, numel) for r in range(world_size)])
                want = stack.sum(0) if op is SUM else stack.amax(0)
            assert torch.equal(tensor, want)

        pieces, out = [stamp(rank + r, numel) for r in range(world_size)], torch.zeros(numel)
        both(group, lambda g, o, *of, op=op: dist.reduce_scatter(o, list(of), op, group=g), out.clone(), *pieces)
        both(group, lambda g, o, t, op=op: dist.reduce_scatter_tensor(o, t, op, group=g), out, torch.cat(pieces))


@on_ranks(2, 3)
def test_all_to_all_with_unequal_splits(rank, world_size):
    """One operation has empty messages, messages in the slot, and larger ones."""
    group = shm_group()
    for rows in (1, 3000):
        counts = [[(r * 2 + c) % 3 * rows for c in range(world_size)] for r in range(world_size)]  # [from][to]
        sends, receives = counts[rank], [counts[r][rank] for r in range(world_size)]

        def single(g, out, t, receives=receives, sends=sends):
            dist.all_to_all_single(out, t, receives, sends, group=g)

        both(group, single, torch.zeros(sum(receives), 2), stamp(rank, sum(sends) * 2).view(-1, 2))
        # gloo needs equally large tensors in a list.
        out = [torch.zeros(n) for n in receives]
        dist.all_to_all(out, [stamp(rank + 2 * r, n) for r, n in enumerate(sends)], group=group)
        for r, n in enumerate(receives):
            assert torch.equal(out[r], stamp(r + 2 * rank, n))


@on_ranks(2)
def test_tensors_of_all_kinds(rank):
    # Bool and complex reductions.
    group = shm_group()
    for op, want in [(SUM, [0, 1, 1, 1]), (MAX, [0, 1, 1, 1]), (PRODUCT, [0, 0, 0, 1]), (MIN, [0, 0, 0, 1])]:
        tensor = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]][rank], dtype=torch.bool)
        dist.all_reduce(tensor, op, group=group)
        assert tensor.view(torch.uint8).tolist() == want
    for dtype, numel in each((torch.complex64, torch.complex128), (3, 5000)):
        tensor = torch.complex(stamp(rank, numel), stamp(rank + 1, numel)).to(dtype)
        dist.all_reduce(tensor, group=group)
        want = torch.complex(stamp(0, numel) + stamp(1, numel), stamp(1, numel) + stamp(2, numel)).to(dtype)
        assert torch.equal(tensor, want)
        tensor = (tensor * (rank + 1)).view(-1)
        dist.all_reduce(tensor, AVG, group=group)
        assert torch.equal(tensor, want * 1.5)

    # Tensors with any strides, and with gradients.
    for side in (3, 100):

        def square(r, side=side):
            return stamp(r, side * side).view(side, side).t()

        tensor = square(rank)
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, square(0) + square(1)) and not tensor.is_contiguous()
        tensor = stamp(rank, side * side * 2)[::2]
        dist.broadcast(tensor, 1, group=group)
        assert torch.equal(tensor, stamp(1, side * side * 2)[::2])
        parts = [torch.zeros(side, side).t() for _ in range(2)]
        dist.all_gather(parts, square(rank), group=group)
        assert all(torch.equal(parts[r], square(r)) for r in range(2))
        weight = torch.nn.Parameter(stamp(rank, side * side))
        version = weight._version
        dist.broadcast(weight, 0, group=group)
        dist.all_reduce(weight, group=group)
        assert weight._version == version and torch.equal(weight.data, 2 * stamp(0, side * side))

    # A single element with a stride, which counts as contiguous; these operations go through gloo.
    for count in (0, 1):
        sent, got = torch.arange(1.0 + rank, 5 + rank)[::2][:count], torch.zeros(4)[::2][:count]
        dist.scatter(got, [sent, sent] if rank == 0 else None, 0, group=group)
        assert got.tolist() == [1.0][:count]
        for work in [dist.isend(sent, 1 - rank, group=group), dist.irecv(got, 1 - rank, group=group)]:
            work.wait()
        assert got.tolist() == [2.0 - rank][:count]

    # Sparse tensors, with rows of this rank only.
    sparse = torch.sparse_coo_tensor([[0, rank]], stamp(rank, 6).view(2, 3), (4, 3))
    both(group, lambda g, t: dist.all_reduce(t, group=g), sparse)
    both(group, lambda g, t: dist.all_reduce(t, group=g, async_op=True).get_future().wait(), sparse)

    # Memory from allocate() is reduced in place.
    backend, cpu = group._get_backend(torch.device("cpu")), torch.device("cpu")
    assert backend.supports_tensor_alloc(cpu)
    tensor = backend.allocate_tensor(50_000, dtype=torch.float32, device=cpu)
    for op in (SUM, AVG):
        tensor.fill_(rank + 1 if op is SUM else 3)
        dist.all_reduce(tensor, op, group=group)
        assert tensor.eq(3.0).all()
    out = torch.zeros(100_000)
    dist.all_gather_into_tensor(out, tensor, group=group)
    assert out.eq(3.0).all()
    tensor.fill_(rank)
    dist.reduce(tensor, 0, group=group)
    assert tensor.eq(1.0).all()


@on_ranks(2)
def test_bad_arguments_leave_the_group_as_it_was(rank):
    group = shm_group()
    two, four, five = torch.ones(2), torch.ones(4), torch.ones(5)
    refused = [
        (dist.all_gather_into_tensor, (five, two), f"all_gather_into_tensor on rank {rank}: output has 5 elements"),
        (dist.reduce_scatter_tensor, (two, five), "input has 5 elements"),
        (dist.all_to_all_single, (four, four, [1, 1], [2, 2]), "split sizes add up to 2, the tensor has 4 rows"),
    ]
    assert_each_raises(*((partial(call, *given, group=group), RuntimeError, words) for call, given, words in refused))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3


@on_ranks(2)
def test_coalesced_and_functional_collectives(rank):
    group = shm_group()
    tensors = [stamp(rank, n) for n in (3, 5000, 0, 7)]
    both(group, lambda g, *ts: dist.all_reduce_coalesced(list(ts), group=g), *tensors)
    one = funcol.all_reduce(stamp(rank, 10), "sum", group)
    assert torch.equal(funcol.wait_tensor(one), stamp(0, 10) + stamp(1, 10))
    assert torch.equal(funcol.all_reduce(stamp(rank, 9), "avg", group), (stamp(0, 9) + stamp(1, 9)) / 2)
    gathered = funcol.all_gather_tensor(stamp(rank, 6), 0, group)
    assert torch.equal(gathered, torch.cat([stamp(0, 6), stamp(1, 6)]))
    assert torch.equal(funcol.reduce_scatter_tensor(torch.ones(4), "sum", 0, group), torch.full((2,), 2.0))
    many = funcol.all_gather_into_tensor_coalesced([stamp(rank, 4), stamp(rank, 6000)], group)
    assert torch.equal(many[1], torch.cat([stamp(0, 6000), stamp(1, 6000)]))
    many = funcol.reduce_scatter_tensor_coalesced([torch.ones(4), torch.ones(6000)], "sum", [0, 0], group)
    assert [t.tolist() for t in many] == [[2.0] * 2, [2.0] * 3000]


@on_ranks(4)
def test_subgroups_and_several_groups(rank):
    everyone, evens = shm_group(), shm_group(ranks=[0, 2])
    mine = [shm_group(ranks=[0, 1]), shm_group(ranks=[2, 3])][rank // 2]
    tensor, other, paired = stamp(rank, 5000), stamp(rank, 5000), stamp(rank, 5000)
    handles = [dist.all_reduce(tensor, group=everyone, async_op=True)]
    if rank % 2 == 0:
        handles.append(dist.broadcast(other, 2, group=evens, async_op=True))
    handles.append(dist.all_reduce(paired, group=mine, async_op=True))
    for handle in reversed(handles):
        handle.wait()
    assert torch.equal(tensor, sum(stamp(r, 5000) for r in range(4)))
    assert torch.equal(other, stamp(2 if rank % 2 == 0 else rank, 5000))
    first = rank // 2 * 2
    assert torch.equal(paired, stamp(first, 5000) + stamp(first + 1, 5000))


@on_ranks(2)
def test_a_group_leaves_nothing_behind():
    def use() -> tuple[int, int]:
        group = shm_group()
        dist.all_reduce(torch.ones(50_000), group=group, async_op=True).get_future().wait()
        dist.destroy_process_group(group)
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    counts = [use() for _ in range(9)]
    with open("/proc/self/maps") as maps:
        assert not any("memfd" in line for line in maps)
    # gloo, which is still running, may have opened and closed some meanwhile; what each group left would be eight more.
    assert all(last - first < 4 for first, last in zip(counts[0], counts[-1], strict=True)), counts


@pytest.mark.parametrize("backend", [BACKEND, f"cpu:{BACKEND}"])
@on_ranks(2)
def test_as_the_default_group_and_again_with_the_same_store(rank, backend):
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    for _ in range(2):
        dist.init_process_group(backend, store=store, rank=rank, world_size=2)
        tensor = stamp(rank, 5000)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, stamp(0, 5000) + stamp(1, 5000))
        dist.barrier()
        got = [None, None]
        dist.all_gather_object(got, rank)
        assert got == [0, 1]
        dist.destroy_process_group()


def test_other_groups_are_unchanged_by_this_backend():
    """torch lists the table of plugins to see whether a "cpu:gloo" group gets a default backend."""
    plugins = dist.Backend._plugins
    assert BACKEND.upper() in plugins and BACKEND.upper() not in list(plugins.keys())


@on_ranks(2)
def test_ranks_that_can_not_connect_are_named(rank):
    os.environ["TORCHDDP_HOST_ID"] = f"host{rank}"
    with pytest.raises(RuntimeError, match=f"rank {rank}: the torchddp_shm.*rank 1 is on a different host from rank 0"):
        shm_group()
    del os.environ["TORCHDDP_HOST_ID"]
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 0: the torchddp_shm backend got no answer from rank 1"):
            shm_group(timeout=timedelta(seconds=1))
    dist.barrier()


def trained(wrap, rank) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        torch.manual_seed(step * 10 + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


@on_ranks(2)
def test_models_train_as_over_gloo(rank):
    ways = [
        lambda model, group, cls=cls, options=options: cls(model, process_group=group, **options)
        for cls in (TorchDDP, DistributedDataParallel)
        for options in ({}, {"bucket_cap_mb": 0.001}, {"find_unused_parameters": True})
    ]
    ways.append(lambda model, group: fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu")))
    for way in each(ways):
        results = [trained(lambda model, g=g: way(model, g), rank) for g in (shm_group(), dist.new_group())]  # noqa: B023
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs)
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=shm_group(timeout=timedelta(seconds=30)))
    assert ddp.reducer.transport_name == "shm"  # chosen by default
    assert ddp.session.stall_limit_s == 10.0  # a third of the group's timeout


@on_ranks(2)
def test_a_model_that_could_not_be_wrapped_leaves_the_group_as_it_was(rank):
    group = shm_group(timeout=timedelta(seconds=30))
    wrap = partial(DistributedDataParallel, torch.nn.Linear(3, 3), process_group=group)
    with pytest.raises(RuntimeError, match="needs shared memory"):
        wrap(transport="c10d", precision=Precision(wire=torch.bfloat16))
    kind, text = (MemoryError, "no room") if rank == 1 else (TransportError, "rank 1 gave up")
    with mock.patch.object(_C, "Reducer", side_effect=MemoryError("no room") if rank == 1 else _C.Reducer):
        with pytest.raises(kind, match=text):
            wrap(transport="shm")
    dist.all_reduce(total := torch.ones(3), group=group)
    assert total.tolist() == [2.0] * 3
