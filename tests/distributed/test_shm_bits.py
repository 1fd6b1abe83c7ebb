"""Over shared memory and between hosts, also in 16 bits, sums are bitwise reproducible; gradients are private."""

import gc
import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.chaos.leaks import segments_of
from tests.comm_hooks import live_on
from tests.harness import each, on_ranks, run_ranks
from tests.models import Mlp, NormNet, assert_grads, assert_trains, batch, grads_of, same_on_all_ranks, seeded, step_on
from torchddp import _C, DistributedDataParallel, Precision, TransportError

WIDTH = 100  # gradients of 0.2 to 0.5 MiB in fp64
# More ranks than processors: others do a rank's work while it waits for a processor.
CROWD = "a" * (2 * len(os.sched_getaffinity(0)) + 1)

pytestmark = pytest.mark.beyond_torch("knows no shared memory")


def trained(ddp_class, rank, **options):
    ddp = ddp_class(seeded(Mlp), transport="shm", **options)
    assert_trains(ddp, rank, steps=range(2))
    return ddp


def spoil(ddp):
    for p in ddp.parameters():
        p.grad.fill_(float("nan"))


CHANGES = {
    "clip": lambda ddp: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3),
    "unscale": lambda ddp: torch._foreach_div_([p.grad for p in ddp.parameters()], 1024.0),
    "zero": lambda ddp: ddp.zero_grad(set_to_none=False),
    "spoil": spoil,
}


@on_ranks(3)
def test_a_change_by_one_rank_is_local(rank, ddp_class):
    for change, cap_mb in each(CHANGES, [0.001, 25]):
        ddp = trained(ddp_class, rank, bucket_cap_mb=cap_mb)
        right = grads_of(ddp)
        dist.barrier()
        if rank == 1:
            CHANGES[change](ddp)
            assert not torch.equal(ddp.module.first.weight.grad, right["first.weight"])
        dist.barrier()
        if rank != 1:
            assert_grads(grads_of(ddp), right)
        # It doesn't affect the next step either.
        assert_trains(ddp, rank)
    # Only gradients are shared: one rank's optimizer doesn't change another's weights.
    before = [p.detach().clone() for p in ddp.parameters()]
    dist.barrier()
    if rank == 0:
        torch.optim.SGD(ddp.parameters(), lr=1.0).step()
    dist.barrier()
    assert all(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True)) == (rank != 0)


@on_ranks(2)
def test_changes_by_a_rank_that_finishes_before_another(rank, ddp_class):
    ddp = trained(ddp_class, rank, bucket_cap_mb=0.001)
    for step in range(2, 40):
        assert_trains(ddp, rank, steps=[step])
        if step % 2 == rank:
            spoil(ddp)


@pytest.mark.parametrize("width", [8, 257], ids=["of buckets", "of the pool"])
@on_ranks(2, needed_ranks=[0])
def test_gradients_outlive_module_and_peer(rank, ddp_class, width):
    ddp = ddp_class(seeded(lambda: Mlp(width)), transport="shm")
    assert_trains(ddp, rank, width, range(2))
    module, right = ddp.module, grads_of(ddp)
    del ddp
    gc.collect()
    assert_grads(grads_of(module), right, rtol=0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        dist.barrier()  # the peer has gone
    assert_grads(grads_of(module), right, rtol=0)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module(batch(rank, 0, 5, width)).square().sum().backward()
    for p in module.parameters():
        p.grad.mul_(2)


# Each rank's host: hosts of different sizes, and hosts whose ranks are not consecutive.
PLACES = ["abb", "aaab", "abab"]
RTOL = 1e-14  # fp64 sums that differ only in order


def both(ddp_class, make, **options):
    """A model of the class under test and one of torch's, with equal weights."""
    ours = ddp_class(seeded(make), transport="shm", bucket_cap_mb=0.001, **options)
    assert ours.reducer.transport_name == "shm"
    return ours, TorchDDP(seeded(make), bucket_cap_mb=0.001, **options)


def assert_same(models, inputs, steps):
    """Assert equal gradients after each step."""
    for step in range(steps):
        for ddp in models:
            ddp.zero_grad()
            ddp(*inputs(step)).square().sum().backward()
        assert_grads(grads_of(models[0]), grads_of(models[1]), rtol=RTOL, what=f"step {step}:")
        grads = [p.grad for p in models[0].parameters() if p.grad is not None]
        assert same_on_all_ranks(grads), f"step {step}: ranks differ"


def at(*places):
    return pytest.mark.parametrize(("places", "world_size"), [(place, len(place)) for place in places])


@at(*PLACES)
@on_ranks()
def test_gradients_are_those_of_torch(rank, ddp_class, places):
    live_on(places, rank)
    for options in each([{}, {"static_graph": True}, {"gradient_as_bucket_view": False}]):
        assert_same(both(ddp_class, Mlp, **options), lambda step: [batch(rank, step)], 3)


@pytest.mark.rest_is_thorough("aaa-3", "aabb-4")
@at("aaa", "aabb", CROWD)
@on_ranks()
def test_runs_agree(rank, ddp_class, places):
    live_on(places, rank)
    runs = []
    for run in range(5):
        ddp = ddp_class(seeded(lambda: Mlp(WIDTH)), transport="shm", bucket_cap_mb=0.1)
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(rank, step, 5, WIDTH)).square().sum().backward()
        runs.append(grads_of(ddp))
        assert_grads(runs[run], runs[0], rtol=0, what=f"run {run}:")
    assert same_on_all_ranks(runs[0].values())


@at("aabb")
@on_ranks()
def test_large_models_and_buffers(rank, ddp_class, places):
    live_on(places, rank)
    # Gradients of 3 MiB and buckets that don't divide into shards: many chunks.
    models = both(ddp_class, lambda: Mlp(257))
    assert_same(models, lambda step: [batch(rank, step, 5, 257)], 2)

    # Buffers are rank 0's.
    models = both(ddp_class, NormNet)
    assert_same(models, lambda step: [batch(rank, step, 2, 3, 6, 6)], 3)
    with torch.no_grad():
        for ddp in models:
            ddp(batch(0, 9, 2, 3, 6, 6))
    assert same_on_all_ranks(models[0].buffers())
    for ours, theirs in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("places", "victim"), [("aab", 0), ("abb", 0), ("aabb", -1), ("abab", -1)])
def test_dead_rank_is_detected_on_both_hosts(ddp_class, places, victim):
    """Also by ranks that share no memory with it, and by one without its own link to the other host."""
    dead = range(len(places))[victim]
    survivors = [rank for rank in range(len(places)) if rank != dead]

    def work(rank):
        live_on(places, rank)
        ddp = ddp_class(seeded(Mlp), transport="shm", bucket_cap_mb=0.001)
        for step in range(3):
            step_on(ddp, rank, step)
        if rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(TransportError):
            for step in range(3):
                step_on(ddp, rank, step)

    run_ranks(work, len(places), needed_ranks=survivors)


def wide_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 1000), nn.Tanh(), nn.Linear(1000, 7))


def step_of(model, rank, step=0):
    model.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(5, 300)).square().sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.rest_is_thorough("3-*float16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks(3, 4)
def test_each_host_rounds_its_sum_once(rank, dtype, world_size):
    """With one owner per host, and two."""
    hosts = "aabb"[:world_size]
    live_on(hosts, rank)
    ddp = DistributedDataParallel(wide_layers(), transport="shm", precision=Precision(wire=dtype))
    for step in range(3):
        got = step_of(ddp, rank, step)
        for grad, *local in zip(got, *(step_of(wide_layers(), r, step) for r in range(world_size)), strict=True):
            sums = dict.fromkeys(hosts, 0.0)
            for host, addend in zip(hosts, local, strict=True):
                sums[host] = sums[host] + addend * (1 / world_size)
            assert torch.equal(grad, sum(total.to(dtype).float() for total in sums.values()))
    assert same_on_all_ranks(got)


@on_ranks(3)
def test_other_dtypes_are_sent_unchanged_and_bad_arguments(rank):
    live_on("aab", rank)
    ddp = DistributedDataParallel(seeded(Mlp), transport="shm", precision=Precision(wire=torch.bfloat16))
    plain = DistributedDataParallel(seeded(Mlp), transport="shm")
    for model in (ddp, plain):
        step_on(model, rank)
    assert_grads(grads_of(ddp), grads_of(plain), rtol=0)
    with pytest.raises(ValueError, match=r"must be torch.bfloat16, torch.float16 or None, got torch.int8"):
        DistributedDataParallel(wide_layers(), precision=Precision(wire=torch.int8))
    with pytest.raises(
        ValueError, match=r"wire \(formerly wire_dtype\) is None on rank 0, 2, torch.bfloat16 on rank 1"
    ):
        DistributedDataParallel(
            wide_layers(), transport="shm", precision=Precision(wire=torch.bfloat16 if rank == 1 else None)
        )


class Pending(dist.Work):
    def is_completed(self):
        return False


class Silent(dist.ProcessGroup):
    """A group of two ranks whose peer never answers, and writes long after the transport is gone."""

    def __init__(self):
        super().__init__(0, 2)
        self.writes_to = []

    def allreduce(self, tensors, options=None):
        self.writes_to += tensors
        self.work = Pending()
        return self.work


@on_ranks(1)
def test_memory_stays_for_as_long_as_the_process_group_may_write_to_it():
    """On a rank that is alone on its host."""
    limits = {"connect_timeout": timedelta(seconds=20), "timeout": timedelta(seconds=20)}
    endpoint, outer = _C.ShmEndpoint(0), Silent()
    transport = endpoint.connect(
        outer, local_ranks=[0], addresses=[endpoint.address], outer_group=outer, places=[0, 0], outer_ranks=[0, 1],
        owners=1, spans=True, **limits,
    )  # fmt: skip
    tensor = transport.allocate(100_000, torch.ones(1))
    work = transport.make_work()
    transport.all_reduce(tensor, work)
    with pytest.raises(TransportError, match="timed out after 50 ms"):
        work.wait(timedelta(milliseconds=50))
    del work, tensor, transport, endpoint
    gc.collect()
    assert segments_of()
    outer.writes_to.pop().fill_(7)
    gc.collect()
    assert not segments_of()
