"""A model continues over another process group: ranks leave, die or join; groups that end leave nothing behind."""

import ctypes
import gc
import os
import re
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchddp
from tests.comm_hooks import live_on
from tests.harness import gathered, logged, on_ranks, over_both, status_bytes
from tests.models import Branches, Mlp, NormNet, assert_grads, batch, grads_of, loss_of, reordered, seeded, step_on
from tests.unit.helpers import wait_until
from torchddp import DDP, Checks
from torchddp.averaging import HierarchicalAverager
from torchddp.comm_hooks import exchange
from torchddp.transport import store

MMAP_THRESHOLD = -3  # of mallopt()
MODES = {
    "plain": {},
    "c10d": {"transport": "c10d"},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "auto": {"bucket_cap_mb": "auto"},
}


def among(*ranks):
    return dist.new_group(list(ranks), use_local_synchronization=True)


def wrap(group, **options):
    return DDP(seeded(Mlp), process_group=group, **{"bucket_cap_mb": 0.001, **options})


def assert_steps_of(reference, model, rank, run=step_on, steps=2):
    for step in range(steps):
        for each in (model, reference):
            each.zero_grad()
            run(each, rank, step)
        assert_grads(grads_of(model), grads_of(reference), what=f"rank {rank}, step {step}:")


def assert_as_fresh(model, group, rank):
    """Assert the gradients of torch's class over the group, with the same parameters."""
    reference = seeded(Mlp)
    reference.load_state_dict(model.module.state_dict())
    assert_steps_of(TorchDDP(reference, process_group=group, init_sync=False), model, rank)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(4)
def test_ranks_join_and_leave(rank, mode):
    """Two ranks, then three, four, two, one, three; joining ranks have no measured bucket order."""
    members = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 1], [1], [1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    model = wrap(groups[0] if rank < 2 else among(rank), **MODES[mode])
    for step in range(3):
        step_on(model, rank, step)
    for ranks, group in zip(members, groups, strict=True):
        if rank in ranks:
            model.update_process_group(group)
            assert_as_fresh(model, group, rank)
    assert gathered(model.reducer.transport_name)[1:] == ["c10d" if mode == "c10d" else "shm"] * 3


@on_ranks(3)
def test_a_rank_that_joins_after_uneven_inputs(rank):
    """What forwards send under `join()` ends with its group: a new rank would not answer."""
    group = among(0, 1) if rank < 2 else among(rank)
    model = DDP(seeded(NormNet), process_group=group, checks=Checks(parameters_every=1))
    if rank < 2:
        with model.join():
            for step in range(2 + rank):
                loss_of(model(batch(rank, step, 2, 3, 5, 5))).backward()
    model.update_process_group(dist.group.WORLD)
    model.sync_module_states(src=0)
    for step in range(2):
        loss_of(model(batch(rank, step, 2, 3, 5, 5))).backward()
        grads = gathered(model.module.head.weight.grad)
        assert torch.equal(grads[0], grads[2])
    with torch.no_grad():
        model.module.head.weight += rank
    with pytest.raises(torchddp.DesyncError, match=r"head\.weight"):
        model(batch(rank, 2, 2, 3, 5, 5))


@pytest.mark.parametrize(
    ("make", "options"), [(lambda: reordered(Mlp(4)), {}), (Branches, {"find_unused_parameters": True})]
)
@on_ranks(3)
def test_joining_ranks_use_the_buckets_that_the_others_measured(rank, make, options):
    def run(model, rank, step):
        branch = [("left", "right")[(rank + step) % 2]] if make is Branches else []
        loss_of(model(batch(rank, step, 5, 4), *branch)).backward()

    group = among(0, 1) if rank < 2 else among(rank)
    model = DDP(seeded(make), process_group=group, bucket_cap_mb=0.0001, **options)
    for step in range(3) if rank < 2 or make is Branches else ():
        run(model, rank, step)
    model.update_process_group(dist.group.WORLD)
    plans = gathered([list(bucket.params) for bucket in model.reducer.plan.buckets])
    assert plans == [plans[0]] * 3
    assert_steps_of(TorchDDP(seeded(make), **options), model, rank, run, 3)


@on_ranks(3)
def test_joining_ranks_get_parameters_and_buffers(rank):
    whole = dist.group.WORLD
    model = seeded(NormNet, seed=rank)
    model = DDP(model, process_group=among(1, 2) if rank else among(0), forward_sync_buffers=False)
    wanted = gathered({name: value.clone() for name, value in model.module.state_dict().items()})[2]
    model.update_process_group(whole)
    held = [p.data_ptr() for p in model.parameters()]
    model.sync_module_states(src=2)
    torch.testing.assert_close(dict(model.module.state_dict()), wanted, rtol=0, atol=0)
    assert held == [p.data_ptr() for p in model.parameters()]
    for src in (-1, 3):
        with pytest.raises(ValueError, match=f"0 to 2, got {src}"):
            model.sync_module_states(src)


@on_ranks(2)
def test_parameters_that_can_not_be_sent_as_bytes(rank):
    """Parameters of a tensor subclass are sent by torch's code."""

    class Special(nn.Parameter):
        pass

    module = nn.Linear(2, 2, bias=False)
    module.weight = Special(torch.full((2, 2), float(rank)))
    model = DDP(module, process_group=among(rank))
    model.update_process_group(dist.group.WORLD)
    model.sync_module_states(src=1)
    assert gathered(model.module.weight.sum().item()) == [4.0, 4.0]


@on_ranks(3)
def test_groups_without_this_rank_are_refused_by_the_next_step(rank):
    model = wrap(dist.group.WORLD)
    step_on(model, rank)
    pair = dist.new_group([0, 1])
    model.update_process_group(pair)
    if rank == 2:
        with pytest.raises(RuntimeError, match="rank 2 of its old process group.*this rank is not in"):
            step_on(model, rank)
        with model.no_sync():
            step_on(model, rank)
    else:
        assert_as_fresh(model, pair, rank)
    whole = dist.new_group([0, 1, 2])
    model.update_process_group(whole)
    assert_as_fresh(model, whole, rank)


@on_ranks(2)
def test_refused_groups_leave_the_old_group_in_place(rank):
    # Unusable groups.
    model = wrap(dist.group.WORLD)
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    with pytest.raises(RuntimeError, match="was destroyed"):
        model.update_process_group(gone)
    for wrong in (None, [0, 1], "gloo"):
        with pytest.raises(TypeError, match=f"takes a process group, got {type(wrong).__name__}"):
            model.update_process_group(wrong)
    elsewhere = dist.new_group([0, 1], backend="cuda:gloo")
    with pytest.raises(ValueError, match="no backend for cpu tensors, and the model is on cpu.*one for cuda"):
        model.update_process_group(elsewhere)
    assert_as_fresh(model, dist.group.WORLD, rank)

    # Differing models are reported.
    model = DDP(nn.Linear(3, 3 + rank), process_group=among(rank))
    with pytest.raises(RuntimeError, match="not the same on all ranks") as caught:
        model.update_process_group(dist.group.WORLD)
    assert re.search(r"rank 1: .*'bias' has sizes \[4\]; on rank 0 \('bias'\) it has \[3\]", str(caught.value))
    assert model.process_group.size() == 1
    model(torch.ones(1, 3)).sum().backward()


@on_ranks(3)
def test_a_new_store(rank, tmp_path):
    """Everything is created again, as in programs in which ranks started later can join."""
    model = None
    for number, ranks in enumerate(([0, 1], [0, 1, 2], [1, 2])):
        if rank in ranks:
            if dist.is_initialized():
                dist.destroy_process_group()
            store = dist.FileStore(f"{tmp_path}/{number}", len(ranks))
            dist.init_process_group("gloo", store=store, rank=ranks.index(rank), world_size=len(ranks))
            if model is None:
                model = wrap(among(ranks.index(rank)))
            model.update_process_group(dist.group.WORLD)
            assert_as_fresh(model, dist.group.WORLD, rank)
            assert model.reducer.transport_name == "shm"


@on_ranks(3)
def test_ranks_beyond_those_that_own_shards_keep_the_names_of_groups_equal(rank):
    """Of two hosts with two ranks and one, the second rank of the first owns nothing between them."""
    os.environ["TORCHDDP_HOST_ID"] = str(rank // 2)
    model = wrap(None, transport="shm")
    step_on(model, rank)
    pair = dist.new_group([0, 1] if rank < 2 else [2], use_local_synchronization=True)
    others = dist.new_group([0, 1, 2], use_local_synchronization=True)
    for group in (pair, others):
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == group.size()


@pytest.mark.parametrize("kind", ["hosts", "neighbors", "batches", "hook"])
@on_ranks(4)
def test_ranks_may_be_in_unequal_numbers_of_groups(rank, kind):
    """The names of groups that only some ranks create depend on it. Later ones that all ranks create do not."""
    live_on("aabb" if kind in ("hosts", "hook") else None, rank)
    members = [0, 1, 3]
    for _ in range(3):
        dist.new_group([1, 3])
    some = dist.new_group(members)
    if kind == "hosts":
        DDP(seeded(Mlp), transport="shm")
    elif kind == "neighbors":
        HierarchicalAverager(seeded(Mlp).parameters(), {1: 2, 2: 4})
    elif rank in members:
        if kind == "batches":
            assert list(torchddp.sync.even_batches(range(5 + rank), process_group=some)) == list(range(5))
        else:
            DDP(nn.Linear(3, 3), process_group=some, comm_hook="int8")
    everyone = dist.new_group()
    dist.barrier(everyone)


@on_ranks(2)
def test_a_group_of_one_rank_in_a_job_of_many_is_told_once(rank):
    lines = logged()
    alone = [dist.new_group([one]) for one in range(2)][rank]
    models = [wrap(group) for group in (alone, alone, None)]
    said = [line for line in lines if "only this rank, although the job has 2" in line]
    assert sum(gathered(len(said))) == 1 and len(models) == 3


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


@pytest.mark.parametrize(
    ("transport", "order"),
    [("shm", "model first"), ("c10d", "group first"), ("shm", "model stays"), ("c10d", "model stays")],
)
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
    join(tcp_store(rank), "all", rank, 2)
    pair = dist.new_group([0, 1])
    before = open_resources()
    models = [
        train(transport="c10d", checks=Checks(nonfinite=True), process_group=group)
        for group in (None, pair)
        for _ in range(3)
    ]
    with torchddp.fail_together(), torchddp.fail_together(pair):
        dist.barrier()
        served = 2 if rank == 0 else 0  # the server's ends of both connections
        for _ in range(100):  # the watcher opens files of /proc for a moment
            files, threads = (now - then for now, then in zip(open_resources(), before, strict=True))
            if files == 1 + served:
                break
            time.sleep(0.05)
        # The store's, the watcher, and what ends a stuck interpreter, one in each context.
        assert files == 1 + served and threads <= 4, (files, threads, [thread.name for thread in threading.enumerate()])
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
    def wrapped():
        return torchddp.DistributedDataParallel(torch.nn.Linear(4, 4, bias=False), transport=transport)

    models = [wrapped()]
    (files, _), room = open_resources(), status_bytes("VmSize")
    models += [wrapped() for _ in range(30)]
    assert open_resources()[0] <= files and status_bytes("VmSize") < room + 2**30
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
    assert wait_until(lambda: all(one.is_free for one in exchange._made[dist.group.WORLD]))
    dist.barrier()
    pair = [train(comm_hook="bf16") for _ in range(2)]
    assert groups() == before + 1
    dist.barrier()


@on_ranks(2)
def test_shared_memory_within_a_limit_on_the_address_space(rank):
    resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + 2 * 2**30, resource.RLIM_INFINITY))
    models = [train(transport="shm") for _ in range(3)]
    assert all(torch.equal(model.module.weight.grad, torch.full((4, 4), 2.0)) for model in models)
    dist.barrier()


class InTurns(nn.Module):
    """Gradients become ready in the order of registration, and each fills a bucket."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(1 << 21)) for _ in range(2))

    def forward(self, scale):
        return (self.first * (self.second * scale)).sum()


@on_ranks(2)
def test_a_rank_without_memory_for_new_buckets_tries_again(rank):
    """It reduces the same buckets as the other rank, which has laid them out."""
    model = DDP(InTurns(), transport="c10d", bucket_cap_mb=1, gradient_as_bucket_view=True)
    first, second = model.module.parameters()
    second.data.fill_(2.0)
    model(1.0 + rank).backward()
    kept = [first.grad, second.grad]  # the memory of the old buckets
    model.zero_grad()
    if rank == 1:
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, 1 << 16)  # large blocks come from the system
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + (1 << 20), hard))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            model(1.0 + rank)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    for _ in range(3):
        model(1.0 + rank).backward()
        assert first.grad.unique() == 3.0 and second.grad.unique() == 1.5
        model.zero_grad()
    del kept


@on_ranks(1)
def test_torchs_fake_process_group(rank):
    """It has no options, so no timeout either."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    ours, alone = DDP(seeded(Mlp)), seeded(Mlp)
    for step in range(3):
        for model in (ours, alone):
            model.zero_grad()
            step_on(model, rank, step)
        assert_grads(grads_of(ours), {name: grad / 4 for name, grad in grads_of(alone).items()}, rtol=0)
