"""Which transport a model gets: what "auto" means, who may choose, and that all ranks get the same."""

import copy
import io
import os

import pytest
import torch
import torch.distributed as dist

from tests.harness import each, on_ranks
from tests.models import Mlp, assert_grads, expected_grads, grads_of, seeded, step_on
from torchddp import _C
from torchddp.transport import select
from torchddp.transport.select import CHOICE_ENV, intended_transport

pytestmark = pytest.mark.beyond_torch("has no transports")


@pytest.fixture(autouse=True)
def _no_choice_from_outside(monkeypatch):
    monkeypatch.delenv(CHOICE_ENV, raising=False)


def transport_of(ddp):
    return ddp.reducer.transport_name


def assert_trains(ddp, rank, over=None):
    assert over in (None, transport_of(ddp))
    for step in range(3):
        ddp.zero_grad()
        step_on(ddp, rank, step)
        assert_grads(grads_of(ddp), expected_grads(ddp.module, lambda plain, r, s=step: step_on(plain, r, s)))


@pytest.mark.parametrize(
    "launcher",
    [
        {},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "4"},  # a torchrun for each rank
        {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""},  # srun
    ],
    ids=["forked", "torchrun", "srun"],
)
@on_ranks(1, 2, 4)
def test_ranks_of_a_host_share_memory(rank, world_size, ddp_class, launcher):
    """Whatever launchers know of the host; one rank alone has nobody to share with."""
    os.environ.update(launcher)
    if launcher:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
    assert_trains(ddp_class(seeded(Mlp)), rank, over="shm" if world_size > 1 else "c10d")


@on_ranks(2)
def test_groups_and_devices(rank, ddp_class):
    # `_update_process_group` to a group of one and back.
    ddp = ddp_class(seeded(Mlp))
    alone = [dist.new_group([r]) for r in range(2)][rank]
    found = [transport_of(ddp)]
    for group in (alone, dist.group.WORLD):
        ddp._update_process_group(group)
        found.append(transport_of(ddp))
        step_on(ddp, rank)
    assert_trains(ddp, rank)
    assert found == ["shm", "c10d", "shm"]

    # Memory of another device can't be shared: "auto" keeps to the process group, "shm" says why not.
    devices = [torch.device("cpu"), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match="cuda:1"):
        intended_transport("shm", dist.group.WORLD, devices, collective=True)
    assert intended_transport("auto", dist.group.WORLD, devices, collective=True) == "c10d"

    # `init_sync=False` says that the ranks may come at different times.
    ddp = ddp_class(seeded(Mlp), init_sync=False)
    if rank == 0:
        ddp_class(seeded(Mlp), init_sync=False)  # alone: would hang if it were collective
    assert_trains(ddp, rank, over="c10d")


class Forwarding(dist.ProcessGroup):
    """A process group in Python, with another inside."""

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
def test_groups_in_python_and_torchs_checking_wrapper_are_not_passed_by(rank, ddp_class):
    def create(store, rank, world_size, timeout):
        return Forwarding(dist.ProcessGroupGloo(store, rank, world_size, timeout))

    dist.Backend.register_backend("forwarding", create, devices=["cpu"])
    group = dist.new_group(backend="forwarding")
    assert_trains(ddp_class(seeded(Mlp), process_group=group), rank, over="c10d")
    assert group.reduced >= 3
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    assert_trains(ddp_class(seeded(Mlp), process_group=dist.new_group()), rank, over="c10d")


@on_ranks(2)
def test_copies_are_made_by_one_rank_alone(rank, ddp_class):
    """deepcopy and pickle are not collective: rank 0 makes them while the other waits at a barrier."""
    ddp = ddp_class(seeded(Mlp), transport="shm")
    step_on(ddp, rank)
    if rank == 0:
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        os.environ[CHOICE_ENV] = "shm"
        copies = [copy.deepcopy(ddp), torch.load(file, weights_only=False)]
        assert [transport_of(other) for other in copies] == ["c10d", "c10d"]
    dist.barrier()
    assert_trains(ddp, rank, over="shm")


@on_ranks(2)
def test_the_argument_wins_over_the_environment(ddp_class):
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
def test_ranks_that_choose_differently_all_hear_of_it(rank, ddp_class):
    differing = [("shm", "c10d", "shm"), ("auto", "shm", "c10d"), ("auto", "auto", "c10d")]
    for choices, by_environment in each(differing, [False, True]):
        os.environ[CHOICE_ENV] = choices[rank] if by_environment else ""
        with pytest.raises(ValueError) as caught:
            ddp_class(seeded(Mlp), transport="auto" if by_environment else choices[rank])
        assert all(f"rank {r}: '{choice}'" in str(caught.value) for r, choice in enumerate(choices)), caught.value
        assert CHOICE_ENV in str(caught.value)
        assert_trains(ddp_class(seeded(Mlp), transport="shm"), rank)  # the group is as good as before
    # Differing models are told of before anything is opened.
    del os.environ[CHOICE_ENV]
    with pytest.raises(RuntimeError, match="not the same on all ranks"):
        ddp_class(seeded(lambda: Mlp(8 + rank)))


class SecondGroup:
    """A transport of somebody else's: another gloo group of the same ranks. Counts how often it was opened."""

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
def test_one_that_was_registered(rank, ddp_class):
    """By name, by the environment variable; errors list it; what it can't move is refused; "auto" does not take it."""
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
    with pytest.raises(RuntimeError, match="transport='second' is impossible: no cable"):
        ddp_class(seeded(Mlp))


@on_ranks(2)
def test_one_that_stands_in_for_gloo(rank, ddp_class):
    """The first that is registered for a device comes first: shared memory, unless there is none."""
    kind = SecondGroup()
    kind.register(stands_in_for=("gloo",))
    assert transport_of(ddp_class(seeded(Mlp))) == "shm" and kind.opened == 0
    del select._kinds["shm"]
    assert_trains(ddp_class(seeded(Mlp)), rank)
    assert kind.opened == 1
