"""Bucket sizes follow the measured cost of a message, measured once and equal on all ranks.

With bucket_cap_mb="auto" buckets change once, after some steps; over shared memory default sizes depend on it too.
"""

import copy
import json
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.harness import each, gathered, logged, on_ranks
from tests.models import linears
from torchddp import _C, DistributedDataParallel
from torchddp._extension import CACHE_ENV
from torchddp.ddp import bucket_sizes
from torchddp.ddp.bucket_sizes import default_sizes
from torchddp.plan import auto_plan, plan_cache
from torchddp.plan.auto_plan import RECORDED_STEPS, WARMUP_STEPS, plan_key
from torchddp.plan.buckets import buckets_of
from torchddp.plan.step_profile import LinearCost
from torchddp.transport import message_cost, select
from torchddp.transport.message_cost import MessageLine, NoRoomError, measure_line

PLANNING_STEPS = WARMUP_STEPS + RECORDED_STEPS
layers = partial(linears, 4, 16)


@pytest.fixture(autouse=True)
def no_saved_plans(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_ENV, str(tmp_path))


@pytest.fixture
def expensive_messages(monkeypatch):
    """Make one bucket the best plan, whatever is measured."""
    monkeypatch.setattr(auto_plan, "measure_cost", lambda *_: LinearCost(10.0, 0.0))


def planning_of(ddp):
    """The planning in progress, or None."""
    planning = ddp.observers.get("bucket_planning")
    return planning if planning is not None and planning.is_under_way else None


def small_buckets(ddp):
    """Start with several buckets, so that planning has something to change."""
    specs = ddp.session.specs
    ddp.reducer.adopt_plan(_C.BucketPlan([[index] for index in reversed(range(len(specs)))], specs))


def step(model, rank, index):
    model.zero_grad()
    torch.manual_seed(100 * rank + index)
    model(torch.randn(4, 16)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def steps(model, rank, count):
    for index in range(count):
        step(model, rank, index)


def launches_before_the_last_gradient(ddp, rank):
    """Run a step; return whether a bucket is launched before the last gradient."""
    ddp.reducer.enable_timeline(1000)
    step(ddp, rank, 50)
    kinds = [event.kind for event in ddp.reducer.timeline()]
    return kinds.index("launched") < max(i for i, kind in enumerate(kinds) if kind == "grad_ready")


@on_ranks(1, 3)
def test_results_are_unchanged_and_buckets_change_once(rank, expensive_messages, world_size):
    for transport in ("c10d", "shm") if world_size > 1 else ("c10d",):
        auto = DistributedDataParallel(layers(), bucket_cap_mb="auto", transport=transport)
        fixed = DistributedDataParallel(layers(), bucket_cap_mb=0.001, transport=transport)
        small_buckets(auto)
        counts = []
        for index in range(PLANNING_STEPS + 4):
            for mine, theirs in zip(step(auto, rank, index), step(fixed, rank, index), strict=True):
                # Sums of two don't depend on order, and shared memory adds in rank order.
                exact = world_size <= 2 or transport == "shm"
                torch.testing.assert_close(mine, theirs, **({"rtol": 0, "atol": 0} if exact else {}))
            counts.append(len(auto.reducer.plan))
        assert planning_of(auto) is None
        buckets = buckets_of(auto.reducer.plan)
        assert gathered((counts, buckets)) == [(counts, buckets)] * world_size
        assert counts[:PLANNING_STEPS] == [8] * PLANNING_STEPS, transport
        assert set(counts[PLANNING_STEPS:]) == ({8} if world_size == 1 else {1}), transport


@on_ranks(3)
def test_measurements_improve_poor_buckets(rank, monkeypatch):
    """A real measurement: eighty messages through gloo take several times as long as the computation."""
    decide = mock.Mock(wraps=auto_plan.decide)
    monkeypatch.setattr(auto_plan, "decide", decide)
    ddp = DistributedDataParallel(linears(40, 16), transport="c10d")
    small_buckets(ddp)
    ddp.replan()
    steps(ddp, rank, PLANNING_STEPS)
    step(ddp, rank, 99)
    assert planning_of(ddp) is None
    _, times, cost, _ = decide.call_args.args
    assert 0 < cost.alpha_s < 1 and 0 <= cost.beta_s_per_byte < 1e-6
    assert min(times.ready_s) > 0 and times.forward_s > 0 and len(ddp.reducer.plan) < 40
    found = (cost, times, buckets_of(ddp.reducer.plan))
    assert gathered(found) == [found] * 3


@on_ranks(2)
def test_while_measured_nothing_overlaps(rank):
    ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto", transport="c10d")
    small_buckets(ddp)
    steps(ddp, rank, WARMUP_STEPS)
    assert not launches_before_the_last_gradient(ddp, rank)
    assert [e.id for e in ddp.reducer.timeline() if e.kind == "launched"] == list(range(8))


@on_ranks(2)
def test_a_saved_plan_is_used_at_once(rank):
    key = plan_key(DistributedDataParallel(layers()).session)
    assert (key.world_size, key.ranks_per_host, key.transport, key.backend) == (2, 2, "shm", "gloo")
    wanted = ((7, 6, 5), (4, 3, 2, 1, 0))
    if rank == 0:
        plan_cache.save_plan(key.path, wanted, key, None)
    dist.barrier()
    ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto")
    assert planning_of(ddp) is None and buckets_of(ddp.reducer.plan) == wanted
    steps(ddp, rank, PLANNING_STEPS + 1)
    assert buckets_of(ddp.reducer.plan) == wanted

    if rank == 0:  # a plan that doesn't fit gives a warning, and measuring starts
        document = json.loads(key.path.read_text())
        key.path.write_text(json.dumps({**document, "world_size": 5}))
    dist.barrier()
    records = logged()
    ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto")
    assert planning_of(ddp) is not None
    assert [("world_size is 5" in r, "measures again" in r) for r in records] == [(True, True)] * (rank == 0)


@on_ranks(2)
def test_replan_measures_again_and_copies_plan_separately(rank, expensive_messages):
    ddp = DistributedDataParallel(layers())
    small_buckets(ddp)
    steps(ddp, rank, PLANNING_STEPS + 2)
    assert len(ddp.reducer.plan) == 8  # replan() was not called
    ddp.replan()
    step(ddp, rank, 0)
    ddp.replan()  # again, while planning
    steps(ddp, rank, PLANNING_STEPS + 1)
    assert len(ddp.reducer.plan) == 1 and planning_of(ddp) is None

    ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto")
    steps(ddp, rank, PLANNING_STEPS - 1)
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        small_buckets(twin)
        steps(twin, rank, PLANNING_STEPS + 1)
        assert len(twin.reducer.plan) == 1 and planning_of(twin) is None


@on_ranks(2)
def test_join_and_hooks_keep_the_buckets(rank, expensive_messages):
    for steps_before in each([0, PLANNING_STEPS - 2]):
        ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto")
        small_buckets(ddp)
        steps(ddp, rank, steps_before)
        with ddp.join():
            steps(ddp, rank, PLANNING_STEPS + 2 + 3 * rank)
        steps(ddp, rank, PLANNING_STEPS)
        assert len(ddp.reducer.plan) == 8 and planning_of(ddp) is None
        assert launches_before_the_last_gradient(ddp, rank)

    ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto")
    small_buckets(ddp)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    records = logged()
    steps(ddp, rank, PLANNING_STEPS + 1)
    assert len(ddp.reducer.plan) == 8 and planning_of(ddp) is None
    assert sum("communication hook" in record for record in records) == (rank == 0)  # once per job


@on_ranks(2)
def test_planning_that_fails_or_lacks_memory_for_messages(rank, monkeypatch):
    monkeypatch.setattr(message_cost, "_SHARED_SIZES", (1 << 14, 64 << 20, 8))
    monkeypatch.setenv("TORCHDDP_SHM_LIMIT_MB", "32")
    ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto", transport="shm")
    before = buckets_of(ddp.reducer.plan)
    steps(ddp, rank, PLANNING_STEPS + 2)
    assert planning_of(ddp) is None and buckets_of(ddp.reducer.plan) == before

    monkeypatch.setattr(auto_plan, "measure_cost", mock.Mock(side_effect=RuntimeError("no luck")))
    ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto")
    steps(ddp, rank, PLANNING_STEPS)
    with pytest.raises(RuntimeError, match="no luck"):
        step(ddp, rank, 0)
    assert planning_of(ddp) is None
    step(ddp, rank, 0)


@on_ranks(2)
def test_another_group(rank, expensive_messages):
    """A new group is planned for if "auto" was set in the constructor, not if replan() was called for the old group."""
    ddp = DistributedDataParallel(layers())
    ddp.replan()
    steps(ddp, rank, WARMUP_STEPS + 2)  # while recording
    ddp.update_process_group(dist.new_group([0, 1]))
    assert planning_of(ddp) is None
    small_buckets(ddp)
    assert launches_before_the_last_gradient(ddp, rank)

    ddp = DistributedDataParallel(layers(), bucket_cap_mb="auto")
    steps(ddp, rank, PLANNING_STEPS + 1)
    assert planning_of(ddp) is None
    ddp.update_process_group(dist.new_group([0, 1]))
    assert planning_of(ddp) is not None
    small_buckets(ddp)
    steps(ddp, rank, PLANNING_STEPS + 1)
    assert len(ddp.reducer.plan) == 1


@on_ranks(1)
def test_bad_input(rank):
    ddp = DistributedDataParallel(linears(2, 16))
    other = [_C.ParamSpec(f"p{i}", 3, 4) for i in range(4)]
    with pytest.raises(ValueError, match="made for other parameters"):
        ddp.reducer.adopt_plan(_C.make_bucket_plan(other, [0, 1, 2, 3], [1]))
    before = buckets_of(ddp.reducer.plan)
    step(ddp, rank, 0)
    assert buckets_of(ddp.reducer.plan) == before


MIB = 1024 * 1024
WIDTH = 256
many_layers = partial(linears, 12, WIDTH)


@pytest.fixture
def calls(monkeypatch):
    """Counts the measurements of each process."""
    counted = mock.Mock(side_effect=measure_line)
    monkeypatch.setattr(bucket_sizes, "measure_line", counted)
    return counted


@on_ranks(3)
def test_a_group_is_measured_once_and_by_rank_0(rank, calls, world_size):
    ddp = DistributedDataParallel(many_layers(), transport="shm")
    (cap,) = ddp.session.bucket_caps_bytes
    assert cap in {*(MIB << step for step in range(5)), 25 * MIB} and calls.call_count == 1
    logged = ddp._get_ddp_logging_data()
    assert logged["bucket_caps_bytes"] == str(cap) and logged["bucket_cap_bytes"] == 25 * MIB
    ddp(torch.randn(4, WIDTH)).square().sum().backward()
    sizes = (cap, [bucket.nbytes for bucket in ddp.reducer.plan.buckets])
    assert gathered(sizes) == [sizes] * world_size
    if rank > 0:
        bucket_sizes._lines[dist.group.WORLD] = MessageLine(1.0, 1e-9)  # not used
    if rank == world_size - 1:
        bucket_sizes._lines.clear()  # not missed
    second = DistributedDataParallel(many_layers(), transport="shm").session
    assert calls.call_count == 1 and second.bucket_caps_bytes == [cap]
    DistributedDataParallel(many_layers(), transport="shm", process_group=dist.new_group(range(world_size)))
    assert calls.call_count == 2


@on_ranks(2)
def test_costs_are_not_measured_if_sizes_do_not_depend_on_them(rank, calls):
    for count, arguments, caps in (
        (3, {}, [MIB]),  # 0.75 MiB: one bucket at any cost
        (12, {"bucket_cap_mb": 0.5}, [MIB // 2]),
        (12, {"bucket_cap_mb_list": [1, 2]}, [MIB, 2 * MIB]),
        (12, {"transport": "c10d"}, [MIB, 8 * MIB]),
    ):
        ddp = DistributedDataParallel(linears(count, WIDTH), **{"transport": "shm", **arguments})
        assert not calls.called and ddp.session.bucket_caps_bytes == caps, arguments


@on_ranks(3)
def test_without_memory_on_one_rank_all_use_the_smallest_sizes(rank, monkeypatch):
    monkeypatch.setattr(message_cost, "_SHARED_SIZES", (1 << 14, 64 * MIB, 8))
    monkeypatch.setenv("TORCHDDP_SHM_LIMIT_MB", "32" if rank == 1 else "128")
    transport = select.open_transport("shm", dist.group.WORLD)
    with pytest.raises(NoRoomError, match="67108864 bytes"):
        measure_line(transport, torch.device("cpu"), dist.default_pg_timeout, 0.001)
    assert default_sizes(list(many_layers().parameters()), transport, dist.group.WORLD) == ([MIB], MIB // 4)
    assert not bucket_sizes._lines
