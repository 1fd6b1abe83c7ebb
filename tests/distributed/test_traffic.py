"""`model.traffic()` on real ranks, compared with the algorithms' formulas and with what the kernel counts."""

import inspect
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from benchmarks.hosts import quiet_count, two_hosts
from tests.harness import each, gathered, on_ranks
from tests.models import linears
from torchddp import Precision
from torchddp.harness.launch import RankJob, launch
from torchddp.optim import OSS
from torchddp.traffic import Traffic, of_model

WIDTH = 12
# Elements that divide into shards (units of 128) for 1 to 4 ranks, and too many bytes for a slot.
LARGE = 128 * 12 * 10
layers = partial(linears, 3, WIDTH)


def large():
    """A model with two gradients of LARGE floats each."""
    return nn.Sequential(nn.RMSNorm(LARGE), nn.RMSNorm(LARGE))


def wrapped(make, **options):
    return torchddp.DistributedDataParallel(make(), bucket_cap_mb=0.0005, **options)


def step(ddp):
    ddp.zero_grad()
    ddp(torch.ones(2, ddp.module[0].weight.shape[-1])).sum().backward()


def bucket_bytes(ddp):
    return [bucket.nbytes for bucket in ddp.reducer.plan.buckets]


@on_ranks(1, 3)
def test_all_reduces(world_size):
    others = world_size - 1
    # Through the process group.
    ddp = wrapped(layers, transport="c10d")
    assert ddp.traffic() == {}
    for _ in range(3):  # buckets are rebuilt in the second step
        step(ddp)
        sizes = bucket_bytes(ddp)
        assert len(sizes) > 2
        want = Traffic(sum(sizes), sum(2 * others * nbytes // world_size for nbytes in sizes))
        assert ddp.traffic() == of_model(ddp) == {"c10d": want}
    with ddp.no_sync():
        step(ddp)
    assert ddp.traffic() == {"c10d": want}
    logged = ddp._get_ddp_logging_data()
    assert logged["wire_bytes_c10d"] == want.wire_bytes and logged["bytes_reduced"] == want.payload_bytes
    for option in ("find_unused_parameters", "static_graph"):  # the map of used parameters doesn't count
        other = wrapped(layers, transport="c10d", **{option: True})
        step(other)
        assert other.traffic()["c10d"].payload_bytes == sum(bucket_bytes(other)) == want.payload_bytes
        assert option == "static_graph" or other.traffic() == {"c10d": want}

    # In shared memory.
    big = wrapped(large, transport="shm")
    small = wrapped(layers, transport="shm")  # sums through slots: each rank reads all others' data
    for ddp in (big, small):
        step(ddp)
    nbytes = 2 * 4 * LARGE
    assert big.traffic() == {"shm": Traffic(nbytes, 2 * others * nbytes // world_size)}
    assert small.traffic() == {"shm": Traffic(sum(bucket_bytes(small)), others * sum(bucket_bytes(small)))}


@on_ranks(1, 3)
def test_sharded_gradients_go_to_their_owners(rank, world_size):
    def trained(**options):
        module = layers()
        oss = OSS(module.parameters(), torch.optim.SGD, lr=0.1)
        ddp = torchddp.ShardedDataParallel(module, oss, **options)
        step(ddp)
        oss.step()
        ddp.synchronize()
        return ddp

    for transport in each(["c10d", "shm"]):
        ddp = trained(transport=transport)
        buckets = ddp.reducer.plan.buckets
        mine = sum(bucket.nbytes for bucket in buckets if ddp.session.specs[bucket.params[0]].owner == rank)
        given = sum(bucket.nbytes for bucket in buckets)
        sent = given - mine if transport == "c10d" else (world_size - 1) * mine
        assert ddp.traffic() == {transport: Traffic(given, sent)}
    (counted,) = trained(transport="c10d", reduce_fp16=True).traffic().values()
    assert counted.payload_bytes == given and sum(gathered(counted.wire_bytes)) == (world_size - 1) * given // 2


@on_ranks(3)
def test_buckets_that_are_skipped_sparse_or_reduced_later(rank):
    skipping = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    if "skip_all_reduce_unused_params" in inspect.signature(TorchDDP.__init__).parameters:
        ddp = wrapped(layers, transport="c10d", **skipping)
        ddp.module.forward = ddp.module[2].forward
        step(ddp)
        used = [b.nbytes for b in ddp.reducer.plan.buckets if any(p >= 4 for p in b.params)]
        assert 0 < len(used) < len(ddp.reducer.plan.buckets)
        assert ddp.traffic()["c10d"].payload_bytes == sum(used)

        # A hook counts steps, also one that begins with a later bucket than the last of the step before.
        ddp = wrapped(layers, comm_hook=torchddp.comm_hooks.BF16(), **skipping)
        for number, layer in enumerate((2, 0, 2, 0), start=1):
            ddp.module.forward = ddp.module[layer].forward
            step(ddp)
            assert ddp.traffic()["hook"].payload_bytes == sum(used)
            assert ddp._comm_hooks[0][0].state_dict()["step"] == number

    for transport in each(["c10d", "shm"]):  # sparse gradients are gathered, always by the process group
        ddp = wrapped(lambda: nn.Embedding(50, 4, sparse=True), transport=transport)
        ddp(torch.arange(3)).sum().backward()
        nbytes = 3 * (8 + 4 * 4)  # an index and a row of floats each
        assert ddp.traffic() == {"c10d": Traffic(nbytes, 2 * nbytes)}

    # Reduced after the last microbatch.
    ddp = wrapped(layers, transport="c10d", sync="forced_sync")
    for _ in range(3):
        for index in torchddp.sync.accumulate(ddp, 2):
            before = ddp.traffic()
            step(ddp)
            assert ddp.traffic() == before, f"microbatch {index}"
        nbytes = sum(bucket_bytes(ddp))
        assert ddp.traffic() == {"c10d": Traffic(nbytes, sum(4 * size // 3 for size in bucket_bytes(ddp)))}


@pytest.mark.parametrize(("places", "world_size"), [("aabb", 4), ("aab", 3), ("aabc", 4)])
@on_ranks()
def test_between_hosts(rank, places):
    locals_ = [places.count(place) for place in sorted(set(places))]
    hosts, nbytes = len(locals_), 2 * 4 * LARGE
    os.environ["TORCHDDP_HOST_ID"] = places[rank]
    for wire in each((None, torch.bfloat16)):
        ddp = wrapped(large, transport="shm", precision=Precision(wire=wire))
        step(ddp)
        traffic = ddp.traffic()
        inside, outer = traffic["shm"], traffic.get("outer", Traffic(0, 0))
        assert inside.payload_bytes == nbytes
        assert sum(gathered(inside.wire_bytes)) == sum((size - 1) * 2 * nbytes for size in locals_)  # read, and written
        # Each byte crosses once per host: in a ring, or in 16 bits to every other host.
        each_host = 2 * (hosts - 1) * nbytes // hosts if wire is None else (hosts - 1) * nbytes // 2
        assert sum(gathered(outer.payload_bytes)) == hosts * nbytes
        assert sum(gathered(outer.wire_bytes)) == hosts * each_host


class Counting:
    """A user-defined hook that reports its bytes."""

    def __init__(self):
        self.traffic = Traffic(0, 0)

    def __call__(self, state, bucket):
        buffer = bucket.buffer()
        sent = buffer.nbytes // 4 if bucket.is_last() else 0
        self.traffic = Traffic(self.traffic.payload_bytes + buffer.nbytes, self.traffic.wire_bytes + sent)
        return allreduce_hook(None, bucket)


@on_ranks(2)
def test_a_hook_reports_its_bytes():
    plain, builtin, telling = (wrapped(layers, transport="c10d") for _ in range(3))
    plain.register_comm_hook(None, allreduce_hook)
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    hook = Counting()
    telling.register_comm_hook(None, hook)
    for ddp in (plain, builtin, telling):
        step(ddp)
    nbytes = sum(bucket_bytes(plain))
    assert plain.traffic() == builtin.traffic() == {"hook": Traffic(nbytes, None)}
    assert telling.traffic() == {"hook": hook.traffic} and hook.traffic.payload_bytes == nbytes
    assert "wire_bytes_c10d" not in plain._get_ddp_logging_data()


@on_ranks(1)
def test_other_models_are_refused():
    with pytest.raises(TypeError, match=r"a torchddp\.DistributedDataParallel; got torch\.nn"):
        of_model(TorchDDP(layers()))
    with pytest.raises(TypeError, match="got torch.nn.modules.linear.Linear"):
        of_model(nn.Linear(2, 2))


@pytest.mark.rest_is_thorough("2")
@pytest.mark.slow
@pytest.mark.usefixtures("two_namespaces")
@pytest.mark.beyond_torch("torch counts no bytes")
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_counted_bytes_match_the_interface(ranks_per_host):
    size = 2 * ranks_per_host
    with two_hosts(1_000_000_000, size) as place:
        found = launch(RankJob("traffic", both_counts, (), size), lambda what, done, total: None, place=place)
    for first in range(0, len(found), ranks_per_host):
        ranks = found[first : first + ranks_per_host]
        for name in ranks[0]:
            counted, sent = sum(rank[name]["counted"] for rank in ranks), ranks[0][name]["sent"]
            # The interface also counts headers and acknowledgements.
            assert 0.95 < sent / counted < 1.10, (name, counted, sent)


STEPS = 4


def measure(route, **options):
    """Bytes of one step by `model.traffic()` and by this host's interface."""
    ddp = torchddp.DistributedDataParallel(linears(4, 512), **options)

    def step():
        ddp(torch.ones(2, 512)).sum().backward()

    for _ in range(2):  # buckets are rebuilt
        step()
    before = quiet_count()
    for _ in range(STEPS):
        step()
    sent = (quiet_count() - before) / STEPS
    return {"counted": ddp.traffic()[route].wire_bytes or 0, "sent": sent}


def both_counts(report):
    """Every rank's bytes by route."""
    world_size = dist.get_world_size()
    if world_size == 2:
        mine = {"c10d": measure("c10d", transport="c10d")}
    else:  # ranks of a host share memory
        narrow = measure("outer", transport="shm", precision=torchddp.Precision(wire=torch.bfloat16))
        mine = {"outer": measure("outer", transport="shm"), "narrow": narrow}
    return gathered(mine)
