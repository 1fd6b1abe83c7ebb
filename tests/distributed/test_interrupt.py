"""Transport.interrupt: another thread ends a rank's wait, wherever that is."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import torchddp
from tests.harness import on_ranks, stay
from tests.models import Mlp, batch, loss_of, seeded
from torchddp import TransportError
from torchddp.transport.select import open_transport

REASON = "rank 1 failed: ValueError: no such file"


def raised(call):
    """What a call raises; one that waited for a timeout would have hung."""
    with pytest.raises(RuntimeError) as caught:
        call()
    return caught.value


def interrupted(waits, *calls):
    """What the calls raise when another thread interrupts `waits` a moment later."""
    interrupter = threading.Timer(0.1, lambda: waits.interrupt(REASON))
    interrupter.start()
    errors = [raised(call) for call in calls]
    interrupter.join()
    return errors


def step_on(model, rank, step):
    loss_of(model(batch(rank, step, dtype=torch.float32))).backward()


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
        (error,) = interrupted(transport, handle.wait)
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
@pytest.mark.parametrize("choice", ["c10d", "shm"])
@on_ranks(2)
def test_backward_ends(rank, choice, hook):
    """An interrupted wait for a bucket or for a hook's future names the bucket, like other errors."""
    options = {"comm_hook": "int8"} if hook == "ours" else {}
    model = torchddp.DistributedDataParallel(seeded(Mlp).float(), transport=choice, bucket_cap_mb=0.001, **options)
    if hook == "torch":
        model.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        step_on(model, rank, step)
    if rank == 0:
        loss = loss_of(model(batch(rank, 3, dtype=torch.float32)))
        (error,) = interrupted(model, loss.backward)
        assert isinstance(error, TransportError) and REASON in str(error) and "bucket 0" in str(error), error
        with pytest.raises(TransportError, match=REASON):
            step_on(model, rank, 4)
    stay(rank)


@on_ranks(2, backend="torchddp_shm")
def test_an_interrupt_aborts_a_torch_group_with_our_backend(rank):
    transport = open_transport("c10d", dist.group.WORLD)
    handle = transport.make_work()
    if rank == 0:
        transport.all_reduce(torch.ones(10), handle)
        assert [str(error) for error in interrupted(transport, handle.wait)] == [REASON]
    stay(rank)
