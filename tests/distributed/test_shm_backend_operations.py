"""Operations of the torchddp_shm backend: handles, large all-reduces, messages, and what gloo does for it."""

import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
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


@on_ranks(2)
def test_a_callback_may_wait_for_a_future_that_it_requests(rank):
    """Even if only the thread that runs the callback could finish the operation. torch's PowerSGD does this."""
    group, tensors = shm_group(), [stamp(rank, 10) for _ in range(4)]
    store = dist.distributed_c10d._get_default_store()

    def reduce_next(number):
        if number == 4:
            dist.destroy_process_group(group)  # by a thread that another callback waits for
            return []
        future = dist.all_reduce(tensors[number], group=group, async_op=True).get_future()
        future = future.then(lambda f: [*f.value(), *reduce_next(number + 1)])
        store.set(f"{number} is awaited", "")
        return future.wait()

    if rank == 0:
        for number, tensor in enumerate(tensors):
            store.wait([f"{number} is awaited"])
            dist.all_reduce(tensor, group=group)
    else:
        assert [*map(id, reduce_next(0))] == [*map(id, tensors)]
    assert all(torch.equal(tensor, stamp(0, 10) + stamp(1, 10)) for tensor in tensors)


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
    # Rank 0 has not waited: its watcher brings the result within milliseconds.
    assert wait_until(lambda: all(torch.equal(parts[r], stamp(r, numel)) for r in range(3)))
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


@on_ranks(2)
def test_the_groups_timeout_is_kept_and_names_the_operation(rank):
    reduced = r"timed out after 5000 ms in all_reduce of 40 bytes.*rank 1"
    by_gloo = " on rank 0 over gloo failed: .*[Tt]imed out"
    waits = {
        lambda group: dist.all_reduce(torch.ones(10), group=group, async_op=True).wait(): reduced,
        lambda group: dist.all_reduce(torch.ones(10), group=group, async_op=True).get_future().wait(): reduced,
        WAITS["recv"]: f"recv{by_gloo}",
        WAITS["gather"]: f"gather{by_gloo}",
    }
    groups = [shm_group(timeout=timedelta(seconds=5)) for _ in waits]

    def run(wait, words, group):
        with pytest.raises(RuntimeError, match=words) as caught:
            wait(group)
        return caught.type

    if rank == 0:
        with ThreadPoolExecutor(len(waits)) as pool:  # all wait at once
            kinds = list(pool.map(run, waits, waits.values(), groups))
        assert kinds[0] is kinds[2] is kinds[3] is TransportError
    dist.barrier()
    for group in groups[:2]:
        with pytest.raises(TransportError, match="rank 0 gave up|timed out"):
            for _ in range(2):  # rank 0's input to the first is there
                dist.all_reduce(torch.ones(10), group=group)


WAITS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(50_000), group=group, async_op=True).wait(),
    "future": lambda group: dist.all_reduce(torch.ones(50_000), group=group, async_op=True).get_future().wait(),
    "recv": lambda group: dist.recv(torch.zeros(3), 1, group=group),
    "gather": lambda group: dist.gather(torch.zeros(3), [torch.zeros(3)] * 2, 0, group=group),
}


@pytest.mark.parametrize("what", WAITS)
@on_ranks(2, needed_ranks=[0])
def test_a_dead_rank_ends_what_waits_for_it(rank, what):
    group = shm_group()
    dist.barrier(group=group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    by_gloo = f"{what} on rank 0 over gloo failed: .*(?:closed|reset) by peer"
    with pytest.raises(RuntimeError, match=by_gloo if what in ("recv", "gather") else "rank 1 died") as caught:
        WAITS[what](group)
    assert what == "future" or isinstance(caught.value, TransportError)


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


@on_ranks(1, 3)
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
    with pytest.raises(TransportError, match="no room for 12.* bytes of shared memory .*TORCHDDP_SHM_LIMIT_MB"):
        dist.all_reduce(tensor, group=group, async_op=True).wait()


@on_ranks(2)
def test_errors_of_different_sizes_name_both(rank):
    group = shm_group()
    with pytest.raises(TransportError) as error:
        dist.all_reduce(torch.ones(SMALLEST + rank), group=group)
    texts = gathered(str(error.value))
    assert any("4194304 bytes" in text and "4194308 bytes" in text for text in texts), texts
    with pytest.raises(TransportError, match=r"\w\. The shared-memory transport can't be used after that"):
        dist.all_reduce(torch.ones(1), group=group)


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


def exchange(group: dist.ProcessGroup, mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:
    """Send and receive at once; gloo's sends wait for their receives."""
    for handle in (dist.isend(mine, peer, group=group), dist.irecv(theirs, peer, group=group)):
        handle.wait()


@on_ranks(2)
def test_messages(rank):
    # By order and tag.
    group = shm_group()
    tags = [5, 0, 9, 5, 0]
    for numel in (0, 3, 5000):
        got = [torch.zeros(numel) for _ in tags]
        handles = [dist.isend(stamp(rank + i, numel), 1 - rank, group=group, tag=tag) for i, tag in enumerate(tags)]
        handles += [dist.irecv(got[place], 1 - rank, group=group, tag=tags[place]) for place in (2, 1, 0, 4, 3)]
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

    # Of any dtype and strides.
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
def test_aborts_and_shutdowns_end_collectives(rank):
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

    # One that begins during a shutdown.
    group = shm_group(timeout=timedelta(seconds=5))
    if rank == 0:
        held_up = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        closing = threading.Thread(target=group._get_backend(torch.device("cpu")).shutdown)
        closing.start()
        time.sleep(0.5)  # now it waits for rank 1, which takes part in nothing
        late = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        for handle in (late, held_up):
            with pytest.raises(TransportError, match="rank 0 left the process group before ALLREDUCE"):
                handle.wait()
        closing.join()
    dist.barrier()


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
