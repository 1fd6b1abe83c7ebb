"""The choice of a transport: "auto", explicit choices, and fallbacks if memory can't be shared."""

import contextlib
import copy
import itertools
import os
import re
import resource
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.harness import each, keep_alive, logged, on_ranks, run_ranks, through_a_file
from tests.models import Mlp, assert_grads, assert_trains, batch, expected_grads, grads_of, loss_of, seeded, step_on
from torchddp import _C
from torchddp.transport import select, shm
from torchddp.transport.select import CHOICE_ENV, intended_transport

pytestmark = pytest.mark.beyond_torch("has no transports")


@pytest.fixture(autouse=True)
def _no_choice_from_outside(monkeypatch):
    for name in (select.CHOICE_ENV, shm.LIMIT_ENV, "TORCHDDP_HOST_ID"):
        monkeypatch.delenv(name, raising=False)


def transport_of(ddp):
    return ddp.reducer.transport_name


def assert_trains_over(transport, ddp, rank, width=8):
    assert transport_of(ddp) == transport
    assert_trains(ddp, rank, width)


@on_ranks(1, 2, 4)
def test_ranks_of_a_host_share_memory(rank, world_size, ddp_class):
    """Whatever launchers say about the host; a single rank uses the process group."""
    os.environ[shm.LIMIT_ENV] = "1e30"  # more than a size can hold
    each_a_torchrun = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "4"}
    srun = {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "", "GROUP_WORLD_SIZE": ""}
    processors = sorted(os.sched_getaffinity(0))
    for launcher in each([{}, each_a_torchrun, srun]):
        os.environ.update(launcher)
        assert_trains_over("shm" if world_size > 1 else "c10d", ddp_class(seeded(Mlp)), rank)
        os.sched_setaffinity(0, {processors[rank % len(processors)]})  # as launchers do


@on_ranks(2)
def test_other_devices_and_ranks_that_come_at_different_times(rank, ddp_class):
    # Other devices' memory can't be shared: "auto" uses the process group, and "shm" raises.
    devices = [torch.device("cpu"), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match="cuda:1"):
        intended_transport("shm", dist.group.WORLD, devices, collective=True)
    assert intended_transport("auto", dist.group.WORLD, devices, collective=True) == "c10d"

    # With `init_sync=False` ranks may arrive at different times.
    ddp = ddp_class(seeded(Mlp), init_sync=False)
    if rank == 0:
        ddp_class(seeded(Mlp), init_sync=False)  # on one rank: would hang if it were collective
    assert_trains_over("c10d", ddp, rank)


class Forwarding(dist.ProcessGroup):
    """A Python process group that wraps another."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.reduced = 0

    def allreduce(self, tensors, options=None):
        self.reduced += 1
        return self.inner.allreduce(tensors, options or dist.AllreduceOptions())

    def broadcast(self, tensors, options=None):
        return self.inner.broadcast(tensors, options or dist.BroadcastOptions())

    def allgather(self, outputs, inputs, options=None):
        return self.inner.allgather(outputs, inputs, options or dist.AllgatherOptions())


@on_ranks(2)
def test_python_groups_and_torchs_checking_wrapper_are_not_bypassed(rank, ddp_class):
    dist.Backend.register_backend("forwarding", lambda *at: Forwarding(dist.ProcessGroupGloo(*at)), devices=["cpu"])
    group = dist.new_group(backend="forwarding")
    assert_trains_over("c10d", ddp_class(seeded(Mlp), process_group=group), rank)
    assert group.reduced >= 3
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    assert_trains_over("c10d", ddp_class(seeded(Mlp), process_group=dist.new_group()), rank)


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch < 2.14")
@on_ranks(3)
def test_a_group_whose_ranks_may_change(rank, ddp_class):
    """One model continues with the ranks that are left, a second begins with them."""
    store = dist.PrefixStore("reconfigured", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, enable_reconfigure=True)
    ddp = None
    for members in ((0, 1, 2), (0, 1)):
        if rank not in members:
            break
        store.set(f"{len(members)}/{rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{len(members)}/{member}").decode() for member in members]
        dist._reconfigure(len(members), handles).wait()
        ddp = ddp or ddp_class(seeded(Mlp))
        assert_trains_over("c10d", ddp, rank)
        assert_trains_over("c10d", ddp_class(seeded(Mlp)), rank)
        with pytest.raises(ValueError, match=r"ranks of the process group may change \(enable_reconfigure=True\)"):
            ddp_class(seeded(Mlp), transport="shm")


@on_ranks(2)
def test_copying_is_not_collective(rank, ddp_class):
    """Rank 0 uses deepcopy and pickle while the other waits at a barrier."""
    ddp = ddp_class(seeded(Mlp), transport="shm")
    step_on(ddp, rank)
    if rank == 0:
        os.environ[CHOICE_ENV] = "shm"
        copies = [copy.deepcopy(ddp), through_a_file(ddp, weights_only=False)]
        assert [transport_of(other) for other in copies] == ["c10d", "c10d"]
    dist.barrier()
    assert_trains_over("shm", ddp, rank)


@on_ranks(2)
def test_the_argument_overrides_the_environment(ddp_class):
    for wished, found in {"auto": "shm", "c10d": "c10d", "shm": "shm", "": "shm"}.items():
        os.environ[CHOICE_ENV] = wished
        assert transport_of(ddp_class(seeded(Mlp))) == found
    for wished, given in each(("c10d", "shm", "nonsense"), ("c10d", "shm")):
        os.environ[CHOICE_ENV] = wished
        assert transport_of(ddp_class(seeded(Mlp), transport=given)) == given
    with pytest.raises(ValueError, match="transport must be 'auto', 'c10d', 'shm' or 'nccl', got 'pigeon'"):
        ddp_class(seeded(Mlp), transport="pigeon")
    with pytest.raises(ValueError, match=f"{CHOICE_ENV} must be 'auto', 'c10d', 'shm' or 'nccl', got 'nonsense'"):
        ddp_class(seeded(Mlp))


@on_ranks(3)
def test_ranks_that_choose_differently_all_raise(rank, ddp_class):
    differing = [("shm", "c10d", "shm"), ("auto", "shm", "c10d"), ("auto", "auto", "c10d")]
    for choices, by_environment in each(differing, [False, True]):
        os.environ[CHOICE_ENV] = choices[rank] if by_environment else ""
        with pytest.raises(ValueError) as caught:
            ddp_class(seeded(Mlp), transport="auto" if by_environment else choices[rank])
        assert all(re.search(rf"{choice} on rank [\d, ]*{r}", str(caught.value)) for r, choice in enumerate(choices))
        assert CHOICE_ENV in str(caught.value)
        assert_trains(ddp_class(seeded(Mlp), transport="shm"), rank)  # the group is still usable


class SecondGroup:
    """A third-party transport, over another gloo group of the same ranks, that counts its connections."""

    def __init__(self, reason=""):
        self.opened, self.reason = 0, reason

    def connect(self, group, device, timeout):
        self.opened += 1
        ranks = dist.get_process_group_ranks(group)
        return self.reason or _C.C10dTransport(dist.new_group(ranks, backend="gloo", timeout=timeout))

    def register(self, **options):
        def misfit(devices):
            return "" if {d.type for d in devices} == {"cpu"} else "there are others"

        select.register(select.TransportKind("second", "cpu", "moves CPU tensors", misfit, self.connect, **options))


@on_ranks(1, 3)
def test_a_registered_transport(rank, ddp_class):
    """Chosen by name or environment variable; errors list it; unsupported tensors raise; "auto" ignores it."""
    kind = SecondGroup()
    kind.register()
    assert transport_of(ddp_class(seeded(Mlp))) != "second" and kind.opened == 0
    assert_trains(ddp_class(seeded(Mlp), transport="second"), rank)
    os.environ[CHOICE_ENV] = "second"
    assert_trains(ddp_class(seeded(Mlp)), rank)
    assert kind.opened == 2
    with pytest.raises(ValueError, match="'nccl' or 'second', got 'third'"):
        ddp_class(seeded(Mlp), transport="third")
    with pytest.raises(ValueError, match="transport='second' moves CPU tensors, but there are others"):
        intended_transport("second", dist.group.WORLD, [torch.device("meta")], collective=True)
    SecondGroup("no cable").register()
    with pytest.raises(RuntimeError, match="transport='second' can't be used: no cable"):
        ddp_class(seeded(Mlp))


@on_ranks(2)
def test_a_transport_that_replaces_gloo(rank, ddp_class):
    """The first one registered for a device is preferred: shared memory, if available."""
    kind = SecondGroup()
    kind.register(stands_in_for=("gloo",))
    assert transport_of(ddp_class(seeded(Mlp))) == "shm" and kind.opened == 0
    del select._kinds["shm"]
    assert_trains(ddp_class(seeded(Mlp)), rank)
    assert kind.opened == 1


# Enough for this rank's segment, which is as large as the machine's memory, but not for a second.
LITTLE_SPACE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 2
WIDTH = 256  # fp64 gradients of 1, 3, and 1.5 MiB


def wrapped(ddp_class, make=Mlp, **options):
    """(module, logged warnings)."""
    lines = logged()
    return ddp_class(seeded(make), **options), lines


def falls_back(ddp_class, rank):
    """All use the process group; return the one line that rank 0 logged."""
    ddp, lines = wrapped(ddp_class)
    keep_alive(ddp)  # it has a FileStore, whose destructor ends the process if there is no descriptor left
    assert_trains_over("c10d", ddp, rank)
    assert len(lines) == (rank == 0), lines
    return lines


def limit(what, size):
    resource.setrlimit(what, (size, resource.getrlimit(what)[1]))


def fill_files(left):
    """Leave this process only `left` file descriptors."""
    limit(resource.RLIMIT_NOFILE, max(int(fd) for fd in os.listdir("/proc/self/fd")) + 8)
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    for fd in taken[:left]:
        os.close(fd)


def fails(words):
    return mock.Mock(side_effect=RuntimeError(words))


def runs_out_of_memory():
    """A connection fails once the others have connected, or they would wait for it."""
    connect = shm._C.ShmEndpoint.connect

    def fail(*args, **kwargs):
        connect(*args, **kwargs)
        raise RuntimeError("no memory here")

    shm._C.ShmEndpoint.connect = fail


# name -> (change to a rank, words in the log)
TROUBLES = {
    "no sockets": (lambda: setattr(shm._C, "ShmEndpoint", fails("no sockets")), "no sockets"),
    "no memory": (runs_out_of_memory, "no memory here"),
    "little address space": (lambda: limit(resource.RLIMIT_AS, LITTLE_SPACE), "could not map"),
    "no files": (lambda: fill_files(0), "Too many open files"),
    "few files": (lambda: fill_files(3), "Too many open files"),
    "small files": (lambda: limit(resource.RLIMIT_FSIZE, 1 << 20), "file sizes"),
}


@pytest.mark.parametrize(
    ("trouble", "unable"), [*zip(TROUBLES, itertools.cycle([0, 2]), strict=False), ("no memory", 0)]
)
@on_ranks(3)
def test_one_rank_without_shared_memory(rank, ddp_class, trouble, unable):
    """All use the process group, and rank 0 logs why."""
    cause, reason = TROUBLES[trouble]
    if rank == unable:
        cause()
    lines = falls_back(ddp_class, rank)
    assert all(f"rank {unable}: " in line and reason in line for line in lines), lines


@on_ranks(2)
def test_shared_memory_or_nothing(rank, ddp_class):
    """An explicit "shm" raises on all ranks, with rank and reason; the process group stays usable."""
    make, connect = shm._C.ShmEndpoint, shm._C.ShmEndpoint.connect
    limits = [
        (partial(os.environ.update, {shm.LIMIT_ENV: text}), f"{shm.LIMIT_ENV} must be .* got '{text}'")
        for text in ("nonsense", "-1", "0", "nan", "inf")
    ]
    for cause, reason in each([TROUBLES["no memory"], TROUBLES["no sockets"], *limits]):
        if rank == 1:
            cause()
        with pytest.raises(RuntimeError, match=f"transport='shm' can't be used: .*rank 1: {reason}"):
            ddp_class(seeded(Mlp), transport="shm")
        falls_back(ddp_class, rank)
        shm._C.ShmEndpoint, make.connect = make, connect
        os.environ.pop(shm.LIMIT_ENV, None)
    # Nothing is logged if nothing is wrong.
    assert [wrapped(ddp_class, transport=choice)[1] for choice in ("auto", "shm", "c10d")] == [[], [], []]
    # No two ranks share a host.
    os.environ["TORCHDDP_HOST_ID"] = str(rank)
    with pytest.raises(RuntimeError, match="transport='shm' can't be used: no two ranks are on the same host"):
        ddp_class(seeded(Mlp), transport="shm")
    lines = falls_back(ddp_class, rank)
    assert rank == 1 or "no two ranks are on the same host" in lines[0]


@pytest.mark.parametrize("limited", [(0,), (1,)], ids=str)
def test_gradients_that_do_not_fit(ddp_class, limited, capfd):
    """Gradients take 5.5 MiB: if any rank lacks memory for anything, all use the process group."""
    limits = ["0.5", "1.5", "2", "4", "5"]

    def work(rank):
        for limit_mb in limits:
            if rank in limited:
                os.environ[shm.LIMIT_ENV] = limit_mb
            ddp, _ = wrapped(ddp_class, lambda: Mlp(WIDTH))
            assert_trains_over("c10d", ddp, rank, WIDTH)
        os.environ[shm.LIMIT_ENV] = "16"  # just enough
        ddp, _ = wrapped(ddp_class, lambda: Mlp(WIDTH))
        assert_trains_over("shm", ddp, rank, WIDTH)

    run_ranks(work, 2)
    said = capfd.readouterr().err
    for rank in range(2):
        assert said.count(f"rank {rank}: no room for") == len(limits) * (rank in limited), said


@on_ranks(2)
def test_a_rank_without_memory_for_a_sum_ends_the_wait_of_the_others(rank):
    os.environ[shm.LIMIT_ENV] = "1" if rank == 1 else ""
    transport = torchddp.DDP(seeded(Mlp), transport="shm").reducer.transport
    with pytest.raises(torchddp.TransportError, match="rank 1: no room for" if rank == 1 else "rank 1 gave up"):
        transport.all_reduce(torch.ones(2**19), transport.make_work(), wait=True)


def with_buffer(width, numel):
    """A model whose buckets change after the first step, with a buffer that is broadcast before each forward."""
    module = Mlp(width)
    module._modules["first"] = module._modules.pop("first")
    module.register_buffer("table", torch.ones(numel))
    return module


@pytest.mark.parametrize("limited", [(0,), (1,)], ids=str)
@on_ranks(2)
def test_no_memory_for_buffers_or_during_training(rank, ddp_class, limited):
    """New buckets are made while gradients still hold the old ones: memory is enough for only one set."""
    for width, numel, limit_mb in each([(8, 700_000, "1"), (WIDTH, 100_000, "9")]):
        os.environ[shm.LIMIT_ENV] = limit_mb if rank in limited else ""
        ddp, _ = wrapped(ddp_class, partial(with_buffer, width, numel), bucket_cap_mb=3.5)
        for step in range(4):
            if rank == 1:
                ddp.module.table.zero_()
            loss = loss_of(ddp(batch(rank, step, 5, width)))
            assert ddp.module.table.all()
            ddp.zero_grad(set_to_none=False)
            loss.backward()
            want = expected_grads(ddp.module, lambda m, r, s=step, w=width: loss_of(m(batch(r, s, 5, w))).backward())
            assert_grads(grads_of(ddp), want)
            assert width == 8 or transport_of(ddp) == ("c10d" if step else "shm")
