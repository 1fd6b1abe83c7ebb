"""What a process keeps of process groups that are gone, and what many wrappers of one group cost."""

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.harness import on_ranks, over_both
from tests.unit.helpers import wait_until
from torchddp import Checks
from torchddp.comm_hooks import exchange
from torchddp.transport import store

pytestmark = pytest.mark.beyond_torch


def tcp_store(rank):
    """A store of this test's own, as torchrun has one; ends the group of the harness."""
    told = dist.distributed_c10d._get_default_store()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        told.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(told.get("port")), is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    return store


def join(base, name, rank, world_size):
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, base), rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )


def open_resources():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def train(**options):
    model = torchddp.DistributedDataParallel(torch.nn.Linear(4, 4), **options)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    return model


@pytest.mark.parametrize("order", ["model first", "group first", "model stays"])
@over_both
@on_ranks(2)
def test_a_group_and_its_models_leave_no_thread_and_no_descriptor(rank, transport, order):
    where = tcp_store(rank)
    kept = []

    def live(number):
        join(where, f"life {number}", rank, 2)
        models = [
            train(transport=transport, **options)
            for options in ({"checks": Checks(nonfinite=True)}, {"comm_hook": "bf16"})
        ]
        with torchddp.fail_together():
            dist.barrier()
        if order == "model first":
            models.clear()
            gc.collect()
        dist.barrier()
        dist.destroy_process_group()
        kept.append(models if order == "model stays" else None)
        assert wait_until(lambda: not any(thread.name == "torchddp-store" for thread in threading.enumerate()))
        assert wait_until(lambda: not any(thread.name == "torchddp-watcher" for thread in threading.enumerate()))

    for number in range(2):
        live(number)
    before = open_resources()
    live(2)
    # What a model that stays has itself: over shared memory 3 descriptors for each of its two groups, and its hook's
    # thread and group.
    model_has = 30 if order == "model stays" else 0
    assert wait_until(
        lambda: all(now <= then + model_has for now, then in zip(open_resources(), before, strict=True))
    ), (open_resources(), before, [thread.name for thread in threading.enumerate()])


@on_ranks(2)
def test_all_checks_of_a_process_share_one_connection_to_the_store(rank):
    where = tcp_store(rank)
    join(where, "all", rank, 2)
    pair = dist.new_group([0, 1])
    before = open_resources()
    models = [
        train(transport="c10d", checks=Checks(nonfinite=True), process_group=group)
        for group in (None, pair)
        for _ in range(3)
    ]
    with torchddp.fail_together(), torchddp.fail_together(pair):
        dist.barrier()
        files, threads = (now - then for now, then in zip(open_resources(), before, strict=True))
        served = 2 if rank == 0 else 0  # the server's ends of both connections
        assert files == 1 + served and threads <= 3, (files, threads, [thread.name for thread in threading.enumerate()])
    assert len(models) == 6
    dist.barrier()


SERVER = (
    "import time, torch.distributed as dist\n"
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
    "print(store.port, flush=True)\n"
    "time.sleep(600)"
)


@on_ranks(2)
def test_a_store_whose_host_has_stopped_costs_one_timeout(rank):
    told, server = dist.distributed_c10d._get_default_store(), None
    if rank == 0:
        server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        told.set("port", server.stdout.readline())
    try:
        where = dist.TCPStore("127.0.0.1", int(told.get("port")), is_master=False)
        dist.destroy_process_group()
        join(where, "stopped", rank, 2)
        model = train(transport="c10d", checks=Checks(nonfinite=True))
        dist.barrier()
        if server is not None:
            server.send_signal(signal.SIGSTOP)
        dist.barrier()
        begun = time.monotonic()
        for _ in range(2):
            with torchddp.fail_together(), torchddp.finish_first():
                pass
            assert model.nonfinite() == []
            model = train(transport="c10d", checks=Checks(nonfinite=True))
        assert time.monotonic() - begun < 1.8 * store.TIMEOUT.total_seconds()
        dist.barrier()
    finally:
        if server is not None:
            server.kill()
            server.wait()


@over_both
@on_ranks(3)
def test_a_wrapper_for_each_layer_takes_few_descriptors_and_little_address_space(rank, transport):
    def gib():
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[0]) * resource.getpagesize() / 2**30

    def wrapped():
        return torchddp.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False), transport=transport)

    models = [wrapped()]
    (files, _), room = open_resources(), gib()
    models += [wrapped() for _ in range(30)]
    assert open_resources()[0] <= files and gib() < room + 1
    for model in models:
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    assert all(torch.equal(model.module.weight.grad, torch.full((4, 4), 2.0)) for model in models)
    # Memory of those that are gone serves others.
    for _ in range(3):
        del models[1:]
        models += [wrapped() for _ in range(30)]
        sum(model(torch.full((1, 4), 1.0 + rank)).sum() for model in models[1:]).backward()
        assert all(torch.equal(model.module.weight.grad, torch.full((4, 4), 2.0)) for model in models)
    dist.barrier()


@on_ranks(2)
def test_hooks_that_are_gone_leave_their_process_groups_to_others(rank):
    def groups():
        return len(dist.distributed_c10d._world.pg_map)

    def gone():
        return all(one.is_free for one in exchange._made[dist.group.WORLD])

    pair = [train(comm_hook="bf16") for _ in range(2)]
    before = groups()
    for number in range(4):
        del pair[number % 2]
        gc.collect()
        pair.insert(0, train(comm_hook=("int8", "bf16")[number % 2]))
        assert torch.allclose(pair[0].module.weight.grad, torch.full((4, 4), 2.0)) and groups() == before
    # Not those of which a rank did not finish an operation.
    if rank == 1:
        exchange._made[dist.group.WORLD][0].begun += 1
    pair.clear()
    gc.collect()
    assert wait_until(gone)
    dist.barrier()
    pair = [train(comm_hook="bf16") for _ in range(2)]
    assert groups() == before + 1
    dist.barrier()


@on_ranks(2)
def test_shared_memory_within_a_limit_on_the_address_space(rank):
    with open("/proc/self/statm") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))
    models = [train(transport="shm") for _ in range(3)]
    assert all(torch.equal(model.module.weight.grad, torch.full((4, 4), 2.0)) for model in models)
    dist.barrier()
