"""Several hosts, emulated by TORCHDDP_HOST_ID: shared memory inside each, the process group between them."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.harness import each, on_ranks, run_outcomes
from tests.models import (
    Branches,
    Mlp,
    NormNet,
    assert_grads,
    batch,
    grads_of,
    loss_of,
    same_on_all_ranks,
    seeded,
    step_on,
)

# The host of each rank. Hosts of different size; ranks of a host that do not follow each other.
PLACES = ["aabb", "aab", "abb", "aaab", "abab", "aabbb"]
RTOL = 1e-14  # of fp64: sums are the same but for the order of their terms
NOTICED_S = 5.0

pytestmark = pytest.mark.beyond_torch("knows no hosts")


def live_on(places, rank):
    os.environ["TORCHDDP_HOST_ID"] = places[rank]


def both(ddp_class, make, **options):
    """The module under test and torch's own, of equal weights."""
    ours = ddp_class(seeded(make), transport="shm", bucket_cap_mb=0.001, **options)
    assert ours.reducer.transport_name == "shm"
    return ours, TorchDDP(seeded(make), bucket_cap_mb=0.001, **options)


def assert_same(models, backward, steps):
    """After each of the steps."""
    for step in range(steps):
        for ddp in models:
            ddp.zero_grad()
            backward(ddp, step)
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
        assert_same(both(ddp_class, Mlp, **options), lambda ddp, step: step_on(ddp, rank, step), 3)


@at("aab", "aabb")
@on_ranks()
def test_other_models_and_uneven_inputs(rank, ddp_class, places):
    live_on(places, rank)
    # Gradients of 3 MiB, and buckets that no shard divides: many chunks.
    models = both(ddp_class, lambda: Mlp(257))
    assert_same(models, lambda ddp, step: loss_of(ddp(batch(rank, step, 5, 257))).backward(), 2)

    def branches(ddp, step):
        branch = ("left", "right")[(rank + step) % 2] if step < 3 else "left"
        loss_of(ddp(batch(rank, step, 5, 4), branch)).backward()

    assert_same(both(ddp_class, Branches, find_unused_parameters=True), branches, 4)

    # Buffers are those of rank 0.
    models = both(ddp_class, NormNet)
    assert_same(models, lambda ddp, step: loss_of(ddp(batch(rank, step, 2, 3, 6, 6))).backward(), 3)
    with torch.no_grad():
        for ddp in models:
            ddp(batch(0, 9, 2, 3, 6, 6))
    assert same_on_all_ranks(models[0].buffers())
    for ours, theirs in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)

    # Inside join() a rank that has run out of inputs goes on reducing.
    models = both(ddp_class, Mlp)
    for ddp in models:
        with ddp.join():
            for step in range(rank + 1):
                ddp.zero_grad()
                step_on(ddp, rank, step)
    assert_grads(grads_of(models[0]), grads_of(models[1]), rtol=RTOL)


@pytest.mark.parametrize("places", ["aabb", "aab", "abb", "abab"])
@pytest.mark.parametrize("victim", [0, -1])
def test_dead_rank_is_noticed_on_both_hosts(ddp_class, places, victim):
    """Also by ranks that share nothing with it, and by one that has no link of its own to the other host."""
    dead = range(len(places))[victim]
    survivors = [rank for rank in range(len(places)) if rank != dead]

    def work(rank):
        live_on(places, rank)
        ddp = ddp_class(seeded(Mlp), transport="shm", bucket_cap_mb=0.001)
        for step in range(3):
            step_on(ddp, rank, step)
        if rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            for step in range(3):
                step_on(ddp, rank, step)
        return type(caught.value).__name__, time.monotonic() - started_s

    outcomes = run_outcomes(work, len(places), needed_ranks=survivors, timeout=30, straggler_s=20)
    for rank in survivors:
        assert outcomes[rank].ok, f"rank {rank}: {outcomes[rank].error}"
        name, seconds = outcomes[rank].value
        assert name == "TransportError" and seconds < NOTICED_S, f"rank {rank}: {name} after {seconds:.1f} s"


@on_ranks(4)
def test_same_results_in_each_run(rank, ddp_class):
    live_on("aabb", rank)
    runs = []
    for _ in range(4):
        ddp = ddp_class(seeded(Mlp), transport="shm", bucket_cap_mb=0.001)
        for step in range(3):
            ddp.zero_grad()
            step_on(ddp, rank, step)
        runs.append(grads_of(ddp))
    for other in runs[1:]:
        assert_grads(other, runs[0], rtol=0)


# Alone on its host; the other host never answers, and its process group writes when the transport has long gone.
LATE_WRITER = """
import gc
from datetime import timedelta
import torch
import torch.distributed as dist
from torchddp import _C, TransportError

class Pending(dist.Work):
    def is_completed(self):
        return False

class Silent(dist.ProcessGroup):
    def __init__(self):
        super().__init__(0, 2)
        self.writes_to = []
    def allreduce(self, tensors, options=None):
        self.writes_to += tensors
        self.work = Pending()
        return self.work

endpoint = _C.ShmEndpoint(0)
outer = Silent()
transport = endpoint.connect(
    outer, local_ranks=[0], addresses=[endpoint.address], outer_group=outer, places=[0, 0], outer_ranks=[0, 1],
    owners=1, spans=True, node=None, connect_timeout=timedelta(seconds=20), timeout=timedelta(seconds=20),
)
tensor = transport.allocate(100_000, torch.ones(1))
work = transport.make_work()
transport.all_reduce(tensor, work)
try:
    work.wait(timedelta(milliseconds=50))
except TransportError as error:
    print(error)
del work, tensor, transport, endpoint
gc.collect()
maps = open("/proc/self/maps").read()
outer.writes_to.pop().fill_(7)
gc.collect()
print("memory is", "mapped" if "memfd:torchddp" in maps else "gone")
print("memory is then", "mapped" if "memfd:torchddp" in open("/proc/self/maps").read() else "gone")
"""


def test_memory_stays_for_as_long_as_the_process_group_may_write_to_it():
    done = subprocess.run([sys.executable, "-c", LATE_WRITER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert "timed out after 50 ms" in done.stdout
    assert done.stdout.splitlines()[1:] == ["memory is mapped", "memory is then gone"]
