"""Conformance tests of transports, on inputs whose results have a closed form, and the interruption of their waits.

To test a new transport, add its name to TRANSPORTS.
"""

import threading
import time
from datetime import timedelta
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.harness import assert_each_raises, each, on_ranks, stay
from tests.models import Mlp, batch, loss_of, seeded, step_on
from tests.shm_backend import stamp
from torchddp import _C, DistributedDataParallel, TransportError
from torchddp.transport.select import open_transport

TRANSPORTS = ["c10d", "shm"]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
NUMELS = [0, 1, 7, 1000, 65_537]

on_each_transport = pytest.mark.parametrize("choice", TRANSPORTS)


def opened(choice):
    transport = open_transport(choice, dist.group.WORLD)
    return transport, transport.make_work()


@on_each_transport
@on_ranks(1, 3)
def test_collectives(rank, choice, world_size):
    transport, handle = opened(choice)
    assert (transport.name, transport.rank, transport.size) == (choice, rank, world_size)

    def total(*numel_and_dtype):
        return sum(stamp(r, *numel_and_dtype) for r in range(world_size))

    def run(operation, *arguments):
        """Start and wait, alternately in one call and in two."""
        if next(in_one_call):
            operation(*arguments, handle, wait=True)
        else:
            operation(*arguments, handle)
            handle.wait()
        assert handle.poll()

    in_one_call = cycle([True, False])
    for dtype, numel in each(DTYPES, NUMELS):
        given = stamp(rank, numel, dtype)
        tensor = given.clone()
        run(transport.all_reduce, tensor)
        assert torch.equal(tensor, total(numel, dtype))
        for root in range(world_size):
            tensor = transport.allocate(numel, given) if numel % 2 else given.clone()
            tensor.copy_(given)
            run(transport.reduce, tensor, root)
            if rank == root:
                assert torch.equal(tensor, total(numel, dtype))
            else:
                tensor.fill_(7)  # this rank may reuse it: the root has read it
            tensor = given.clone()
            run(transport.broadcast, tensor, root)
            assert torch.equal(tensor, stamp(root, numel, dtype))

    # A reduce-scatter and an all-gather are an all-reduce.
    for dtype, shard_numel in each((torch.float32, torch.float64), (1, 7, 1000)):
        whole = stamp(rank, shard_numel * world_size, dtype)
        want = total(shard_numel * world_size, dtype)
        shard = torch.full((shard_numel,), -1, dtype=dtype)
        run(transport.reduce_scatter, shard, whole.clone())
        assert torch.equal(shard, want[rank * shard_numel : (rank + 1) * shard_numel])
        gathered = torch.full_like(whole, -1)
        run(transport.all_gather, gathered, shard)
        assert torch.equal(gathered, want)
        run(transport.barrier)


@on_each_transport
@on_ranks(2)
def test_the_user_may_communicate_beside_each_operation(rank, choice):
    transport, handle = opened(choice)
    part, whole, other = (torch.full((numel,), rank + 1.0) for numel in (3, 6, 9))
    for operation, arguments, result, want in (
        (transport.all_reduce, (whole,), whole, 3),
        (transport.reduce_scatter, (part, whole), part, 6),
        (transport.all_gather, (whole, part), whole, 6),
        (transport.reduce, (part, 0), part, 12 if rank == 0 else None),
        (transport.broadcast, (other, 1), other, 2),
        (transport.barrier, (), other, 2),
    ):
        users = torch.full((100_000,), rank + 1.0)
        users_work = dist.all_reduce(users, async_op=True)
        operation(*arguments, handle)
        users_work.wait()
        handle.wait()
        assert users.eq(3).all() and (want is None or result.eq(want).all()), operation


@on_each_transport
@on_ranks(1)
def test_idle_handles_and_bad_arguments(choice):
    transport, handle = opened(choice)
    assert handle.poll()
    handle.wait(timedelta(milliseconds=1))
    two, five, strided = torch.zeros(2), torch.zeros(5), torch.zeros(4, 4).t()[:2]
    refused = [
        (transport.reduce_scatter, (two, five), "input has 5 elements"),
        (transport.all_gather, (five, two), "output has 5 elements"),
        (transport.broadcast, (five, 7), "root 7 is not in [0, 1)"),
        (transport.reduce, (five, 1), "root 1 is not in [0, 1)"),
        (transport.all_reduce, (strided,), "contiguous"),
    ]
    assert_each_raises(*((partial(call, *given, handle), RuntimeError, words) for call, given, words in refused))


@on_each_transport
@pytest.mark.parametrize("limit", [timedelta(days=5_000_000), timedelta.max], ids=["large", "max"])
@on_ranks(2)
def test_the_longest_timeout_does_not_overflow(rank, choice, limit):
    """Added to the current time it would overflow, and the waiting rank would time out at once."""
    ddp = DistributedDataParallel(nn.Linear(100, 100), transport=choice, timeout=limit)
    transport, handle = opened(choice)
    for _ in range(2):
        time.sleep(0.05 * rank)
        ddp(torch.ones(2, 100)).sum().backward()
        tensor = torch.full((5,), float(rank))
        transport.all_reduce(tensor, handle)
        handle.wait(min(limit, timedelta(days=5_000_000)))
        assert tensor[0] == 1


class Recorder(dist.ProcessGroup):
    """A group of one rank that does nothing, and records the timeouts of waits."""

    def __init__(self):
        super().__init__(0, 1)
        self.limits = []
        self.objects = []  # whether a work could have captured one of the thread's Python objects

    def _start(self, *_):
        group = self
        self.objects.append(torch._C._is_key_in_tls("context"))

        class Started(dist._Work):
            def wait(self, timeout=timedelta(0)):
                group.limits.append(timeout)
                return True

        return Started()

    allreduce = broadcast = barrier = _start


def test_operations_of_a_device_are_waited_for_by_its_stream():
    """With a timeout the host would wait for them. A reused Work waits for its last operation."""
    group = Recorder()
    transport = _C.C10dTransport(group)
    limit = timedelta(seconds=7)
    handle = transport.make_work()
    for device in ("meta", "cpu", "meta"):
        transport.all_reduce(torch.zeros(4, device=device), handle)
        handle.wait(limit)
        transport.barrier(handle)  # without a tensor
        handle.wait(limit)
        transport.broadcast(torch.zeros(4, device=device), 0, handle)
        handle.wait(limit)
    none = timedelta(0)
    assert group.limits == [none, limit, none, limit, limit, limit, none, limit, none]


def test_works_capture_no_python_object():
    """A backward passes a Work to its threads, and gloo frees it late: a Python object in it would crash at exit."""
    group = Recorder()
    transport = _C.C10dTransport(group)
    handle = transport.make_work()

    def reduce(gradient):
        assert torch._C._is_key_in_tls("context")
        transport.all_reduce(gradient.contiguous(), handle)
        handle.wait(timedelta(seconds=7))
        assert torch._C._is_key_in_tls("context")

    leaf = torch.ones(4, requires_grad=True)
    leaf.register_hook(reduce)
    leaf.sum().backward()
    assert group.objects == [False]


@on_ranks(2)
def test_a_broadcast_of_the_same_tensors_makes_no_new_views(rank):
    """Tensors that need more than a copy of bytes, like all on devices."""
    transport = open_transport("c10d", dist.group.WORLD, device=torch.device("cpu"), timeout=None)
    broadcast = _C.TensorBroadcast(transport, 1 << 20, timedelta(seconds=30))

    def strided(*sizes, dtype=torch.float32):
        return torch.full(sizes, float(rank + 1), dtype=dtype).t()

    def run(tensors, root):
        for tensor in tensors:
            tensor.fill_(rank + 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            broadcast.run(tensors, root)
        assert all((tensor == root + 1).all() for tensor in tensors)
        return sum(event.name == "aten::view" for event in profile.events())

    tensors = [strided(3, 5), strided(2, 7, dtype=torch.float64)]
    assert run(tensors, 0) > 0
    assert run(tensors, 1) == 0
    assert run([strided(3, 5), strided(2, 7, dtype=torch.float64)], 0) == 0  # other tensors with the same metadata
    assert run([strided(3, 5), strided(7, 2, dtype=torch.float64)], 1) > 0  # another shape in the same bytes
    assert run([strided(3, 5), strided(2, 7, dtype=torch.int64)], 0) > 0
    assert run([*tensors, strided(4, 4)], 1) > 0
    assert run([strided(300, 500), *tensors], 0) > 0  # other memory
    assert run([strided(300, 500), *tensors], 1) == 0


REASON = "rank 1 failed: ValueError: no such file"


def interrupted(waits, call):
    """What the call raises when another thread interrupts `waits` a moment later; one that waited would have hung."""
    interrupter = threading.Timer(0.1, lambda: waits.interrupt(REASON))
    interrupter.start()
    with pytest.raises(RuntimeError) as caught:
        call()
    interrupter.join()
    return caught.value


@on_ranks(2)
def test_a_wait_ends_and_later_operations_fail(rank, world_size):
    """tests/cpp checks the same of shared memory, and that peers hear of it."""
    transport = open_transport("c10d", dist.group.WORLD)
    handle = transport.make_work()
    tensor = torch.ones(100_000)
    transport.all_reduce(tensor, handle)
    handle.wait()
    if rank == 0:
        transport.all_reduce(tensor, handle)
        error = interrupted(transport, handle.wait)
        assert isinstance(error, TransportError) and str(error) == REASON
        handle.abandon()
        for operation in (
            lambda: transport.all_reduce(tensor, handle),
            lambda: transport.broadcast(tensor, 0, handle),
            lambda: transport.barrier(transport.make_work()),
            lambda: transport.all_gather(torch.ones(100 * world_size), torch.ones(100), handle),
            lambda: transport.reduce_scatter(torch.ones(100), torch.ones(100 * world_size), handle),
            lambda: transport.interrupt("a second reason") or transport.all_reduce(tensor, handle),
        ):
            with pytest.raises(TransportError, match=REASON):
                operation()
    stay(rank)


@pytest.mark.parametrize("hook", [None, "torch", "ours"])
@on_each_transport
@on_ranks(2)
def test_backward_ends(rank, choice, hook):
    """An interrupted wait for a bucket or for a hook's future names the bucket, like other errors."""
    options = {"comm_hook": "int8"} if hook == "ours" else {}
    model = DistributedDataParallel(seeded(Mlp).float(), transport=choice, bucket_cap_mb=0.001, **options)
    if hook == "torch":
        model.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        step_on(model, rank, step, torch.float32)
    if rank == 0:
        loss = loss_of(model(batch(rank, 3, dtype=torch.float32)))
        error = interrupted(model, loss.backward)
        assert isinstance(error, TransportError) and REASON in str(error) and "bucket 0" in str(error), error
        with pytest.raises(TransportError, match=REASON):
            step_on(model, rank, 4, torch.float32)
    stay(rank)


@on_ranks(2, backend="torchddp_shm")
def test_an_interrupt_aborts_a_torch_group_with_our_backend(rank):
    transport = open_transport("c10d", dist.group.WORLD)
    handle = transport.make_work()
    if rank == 0:
        transport.all_reduce(torch.ones(10), handle)
        assert str(interrupted(transport, handle.wait)) == REASON
    stay(rank)
