"""Records of calls of torch.distributed, and that watching them is not observable."""

import inspect
import os
import pickle
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce, barrier, irecv, isend, monitored_barrier, new_group
from torch.distributed import distributed_c10d as c10d

import torchddp
from tests.harness import assert_each_raises, on_ranks, process_group, run_ranks
from tests.unit.helpers import wait_until
from torchddp.diagnose import calls, collectives, watched
from torchddp.diagnose.calls import CallWaits

FILE = os.path.basename(__file__)
NAMES = [name for kind in watched._KINDS for name in kind.names if hasattr(c10d, name)]

pytestmark = pytest.mark.beyond_torch("torch keeps nothing of the kind")


def seams():
    """All of torch that watching might change."""
    functions = [getattr(c10d, name) for name in [*NAMES, "init_process_group"]]
    cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in functions]
    return functions, [f.__code__ for f in functions], cells, dist.Work.wait, set(vars(c10d)), dist.group.WORLD


def kept(group=None):
    """The group's records: [number, function, line, shape]."""
    group = group or dist.group.WORLD
    told = CallWaits(dist.group.WORLD).groups()
    rows = told[c10d._world.pg_names[group]].recent
    assert all(os.path.basename(file) == FILE for _, _, file, _, _ in rows)
    return [(number, function, line, shape) for number, function, _, line, shape in rows]


@on_ranks(2)
def test_each_function_is_one_entry(rank):
    """Objects take several collectives, of which the outermost call counts. Messages and subgroups are separate."""
    torchddp.watch_collectives()
    t, two, both, root = torch.ones(2, 3), torch.ones(2).double(), [torch.ones(2, 3) for _ in range(2)], rank == 0
    sub = dist.new_group([0, 1])
    made = [
        ("all_reduce", lambda: dist.all_reduce(t)),
        ("all_reduce", lambda: all_reduce(tensor=t, op=dist.ReduceOp.MAX)),
        ("broadcast", lambda: dist.broadcast(t, 0)),
        ("reduce", lambda: dist.reduce(t, dst=1)),
        ("all_gather", lambda: dist.all_gather(both, t)),
        ("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(torch.ones(4, 3), t)),
        ("gather", lambda: dist.gather(t, both if root else None, 0)),
        ("scatter", lambda: dist.scatter(t, both if root else None, 0)),
        ("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(t, torch.ones(4, 3))),
        ("all_reduce", lambda: dist.all_reduce(t, async_op=True).wait()),
        ("all_to_all_single", lambda: dist.all_to_all_single(two.clone(), two)),
        ("all_gather_object", lambda: dist.all_gather_object([None, None], {"of": rank})),
        ("broadcast_object_list", lambda: dist.broadcast_object_list([rank], 0)),
        ("gather_object", lambda: dist.gather_object(rank, [None, None] if root else None, 0)),
        ("scatter_object_list", lambda: dist.scatter_object_list([None], [1, 2] if root else None, 0)),
        ("barrier", lambda: barrier()),
        ("monitored_barrier", lambda: monitored_barrier()),
    ]
    for _, call in made:
        call()
    dist.all_reduce(t, group=sub), dist.barrier(sub)
    dist.send(t, 1) if root else dist.recv(t, 0)
    for request in dist.batch_isend_irecv([dist.P2POp(isend, t, 1) if root else dist.P2POp(irecv, t, 0)]):
        request.wait()
    dist.barrier()
    rows = kept()
    assert [row[0] for row in rows] == list(range(1, len(made) + 3))
    assert rows[0][1] == "new_group" and rows[-1][1] == "barrier"
    assert [row[1:3] for row in rows[1:-1]] == [(name, call.__code__.co_firstlineno) for name, call in made]
    assert [row[3] for row in rows[1:-1]] == ["float32[2, 3]"] * 10 + ["float64[2]"] + [""] * 6
    assert [row[:2] for row in kept(sub)] == [(1, "all_reduce"), (2, "barrier")]
    assert not calls.active


@on_ranks(2)
def test_nothing_is_left_behind():
    """Also for torch's own names: decorated, introspected, pickled and compared functions don't change."""
    before = seams()
    facts = [(str(inspect.signature(f)), f.__name__, f.__doc__, pickle.dumps(f)) for f in before[0]]
    outer = torchddp.watch_collectives()
    with torchddp.watch_collectives(stall_report_s=3):
        functions = seams()[0]
        assert all(one is other for one, other in zip(functions, before[0], strict=True))
        assert [(str(inspect.signature(f)), f.__name__, f.__doc__, pickle.dumps(f)) for f in functions] == facts
        assert seams() != before
        assert_each_raises(
            (lambda: all_reduce("no tensor"), TypeError, "torch.Tensor"),
            (lambda: isend("no tensor", 0), TypeError, "torch.Tensor"),
            (lambda: all_reduce(torch.ones(1), no_such_argument=1), TypeError, "no_such_argument"),
            (lambda: dist.batch_isend_irecv([]), IndexError, ""),
        )
    count = len(kept())
    dist.barrier()  # the outer context is still active
    assert len(kept()) == count + 1 and kept()[-1][1] == "barrier"
    outer.close()
    assert seams() == before
    dist.barrier()
    assert len(kept()) == count + 1
    outer.close()
    with torchddp.watch_collectives():
        dist.barrier()
    assert seams() == before and not collectives._sources and not calls.active


@on_ranks(2)
def test_what_is_recorded_and_for_how_long():
    # A third of the group's timeout bounds the limit.
    for asked, kept_s in (({}, 10.0), ({"stall_report_s": 2.5}, 2.5)):
        with torchddp.watch_collectives(**asked):
            ((_, source),) = collectives._sources
            assert source.stall_s == kept_s
    group = new_group([0, 1], timeout=timedelta(seconds=2))
    dist.barrier(group)

    # No tensor and no group is kept.
    torchddp.watch_collectives()
    t = torch.ones(8)
    request = dist.all_reduce(t, async_op=True)
    request.wait()
    dist.all_gather([torch.ones(8), torch.ones(8)], t)
    gone = [weakref.ref(t), weakref.ref(request)]
    del t, request
    assert wait_until(lambda: [ref() for ref in gone] == [None, None])  # gloo's thread frees them
    sub = dist.new_group([0, 1])
    dist.barrier(sub)
    key, ref = id(sub), weakref.ref(sub)
    assert key in calls.logs
    dist.destroy_process_group(sub)
    del sub
    assert ref() is None and key not in calls.logs


@on_ranks(2)
def test_new_groups_start_from_scratch(rank, tmp_path):
    """Numbers start at 1, and the new group has its own monitor."""
    torchddp.watch_collectives()
    dist.barrier()
    dist.barrier()
    assert [row[0] for row in kept()] == [1, 2]
    (first,) = [monitor for monitor, _ in collectives._sources]
    dist.barrier()
    dist.destroy_process_group()
    with process_group(dist.FileStore(str(tmp_path / "again"), 2), rank, 2):
        dist.barrier()
        assert [row[0] for row in kept()] == [1]
        assert wait_until(lambda: first.closed) and first is not collectives._sources[-1][0]
        dist.barrier()


def test_when_nothing_is_watched_and_invalid_limits(monkeypatch):
    before = seams()

    def is_watching(**options):
        with torchddp.watch_collectives(**options):
            return seams() != before

    assert not is_watching(stall_report_s=0)
    with monkeypatch.context() as context:
        context.setenv("TORCHDDP_STALL_REPORT_S", "0")
        assert not is_watching()
    level = dist.get_debug_level()
    try:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        assert not is_watching()
        dist.set_debug_level(dist.DebugLevel.INFO)
        assert is_watching()
    finally:
        dist.set_debug_level(level)

    with pytest.raises(TypeError, match="stall_report_s"):
        torchddp.watch_collectives(stall_report_s="3")
    assert seams() == before and not collectives._watchers


def test_without_a_store():
    """A fake group: calls are recorded, but ranks are not queried."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with torchddp.watch_collectives():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            dist.all_reduce(torch.ones(2))
            assert [row[1] for row in kept()] == ["all_reduce"] and not collectives._sources
        finally:
            dist.destroy_process_group()


def test_installing_watches():
    before = seams()
    with torchddp.install():
        watching = seams()
        assert watching != before
        with torchddp.install(transport="shm"):
            assert seams() == watching
        with torchddp.uninstall():
            assert seams() == before
        assert seams() != before
    assert seams() == before


def test_a_forked_child_has_no_records_of_its_parent():
    """Forked ranks watch their own groups, with their own monitors."""
    with torchddp.watch_collectives():
        calls.active[threading.get_ident()] = (0, "wait", None, None, None, None, 0, 0, None)

        def work(rank):
            dist.barrier()
            assert [row[1] for row in kept()] == ["barrier"] and len(collectives._sources) == 1
            dist.barrier()

        try:
            run_ranks(work, 2)
        finally:
            calls.active.clear()


@on_ranks(2)
def test_compiled_programs(rank):
    """Dynamo doesn't see the records or wrappers: as many graphs and breaks as without."""
    import torch._dynamo.testing

    def step(x):
        y = x * 2
        dist.barrier()
        request = dist.all_reduce(y, async_op=True)
        request.wait()
        z = y + 1
        dist.all_reduce(z)
        dist.broadcast(z, 0)
        return z * 2

    def graphs():
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
        compiled = torch.compile(step, backend=counter)
        results = [compiled(torch.ones(3) * (rank + 1)) for _ in range(4)]
        return counter.frame_count, [result.tolist() for result in results]

    without = graphs()
    with torchddp.watch_collectives():
        assert graphs() == without
        assert {"barrier", "broadcast"} <= {row[1] for row in kept()}
    assert graphs() == without
