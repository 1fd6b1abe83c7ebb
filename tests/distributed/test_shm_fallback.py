"""Where memory can't be shared: all ranks go on through the process group together, soon, and rank 0 says why."""

import logging
import os
import resource
import time

import pytest
import torch

from tests.harness import each, on_ranks, run_ranks
from tests.models import Mlp, NormNet, assert_grads, batch, expected_grads, grads_of, loss_of, seeded
from torchddp.transport import select, shm

SOON_S = 5.0
# Room for this rank's segment, which is as large as the machine's memory, and not for a second.
LITTLE_SPACE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 2
WIDTH = 256  # fp64 gradients of 1, 3, and 1.5 MiB

pytestmark = pytest.mark.beyond_torch("has no transports")


@pytest.fixture(autouse=True)
def _no_choice_from_outside(monkeypatch):
    for name in (select.CHOICE_ENV, shm.LIMIT_ENV, shm.TOPOLOGY_ENV, "TORCHDDP_HOST_ID"):
        monkeypatch.delenv(name, raising=False)


class Listening(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def wrapped(ddp_class, make=Mlp, **options):
    """(module, what was logged)."""
    handler = Listening()
    select.logger.addHandler(handler)
    started_s = time.monotonic()
    ddp = ddp_class(seeded(make), **options)
    assert time.monotonic() - started_s < SOON_S, f"{time.monotonic() - started_s:.1f} s: {handler.lines}"
    select.logger.removeHandler(handler)
    return ddp, handler.lines


def assert_trains(ddp, rank, width=8):
    def run(model, r, step):
        loss_of(model(batch(r, step, 5, width))).backward()

    for step in range(3):
        ddp.zero_grad()
        run(ddp, rank, step)
        assert_grads(grads_of(ddp), expected_grads(ddp.module, lambda plain, r, s=step: run(plain, r, s)))


def limit(what, size):
    resource.setrlimit(what, (size, resource.getrlimit(what)[1]))


def fill_files(left):
    """Leaves this process `left` file descriptors."""
    limit(resource.RLIMIT_NOFILE, max(int(fd) for fd in os.listdir("/proc/self/fd")) + 8)
    taken = []
    while True:
        try:
            taken.append(os.dup(0))
        except OSError:
            break
    for fd in taken[:left]:
        os.close(fd)


def no_endpoint():
    def fail(*_):
        raise RuntimeError("no sockets here")

    shm._C.ShmEndpoint = fail


def no_connection():
    def fail(*_, **__):
        raise RuntimeError("no memory here")

    shm._C.ShmEndpoint.connect = fail


def choose_nodes(text):
    os.environ[shm.TOPOLOGY_ENV] = text


# name -> (what to do to a rank, what it is called in the log)
TROUBLES = {
    "no sockets": (no_endpoint, "no sockets here"),
    "no memory": (no_connection, "no memory here"),
    "little address space": (lambda: limit(resource.RLIMIT_AS, LITTLE_SPACE), "could not map"),
    "no files": (lambda: fill_files(0), "Too many open files"),
    "one file": (lambda: fill_files(1), "Too many open files"),
    "few files": (lambda: fill_files(3), "Too many open files"),
    "small files": (lambda: limit(resource.RLIMIT_FSIZE, 1 << 20), "file sizes"),
    "no nodes": (lambda: choose_nodes("0,x"), "as in '0,0,1,1', got '0,x'"),
    "nodes of fewer": (lambda: choose_nodes("0,1"), "TORCHDDP_TOPOLOGY lists 2 nodes for the 3 ranks of its host"),
    "nodes of more": (lambda: choose_nodes("0,0,1,1"), "TORCHDDP_TOPOLOGY lists 4 nodes for the 3 ranks of its host"),
}


@pytest.mark.parametrize(("trouble", "unable"), [*zip(TROUBLES, [0, 2] * 5, strict=True), ("no memory", 0)])
def test_one_rank_that_can_not(ddp_class, trouble, unable):
    cause, reason = TROUBLES[trouble]

    def work(rank):
        if rank == unable:
            cause()
        ddp, lines = wrapped(ddp_class)
        assert_trains(ddp, rank)
        return ddp.reducer.transport_name, lines

    found = run_ranks(work, 3)
    assert [name for name, _ in found] == ["c10d"] * 3
    lines = [line for _, logged in found for line in logged]
    assert len(lines) == 1 and found[0][1] == lines, lines
    assert lines[0].startswith("WARNING: ") and f"rank {unable}: " in lines[0] and reason in lines[0], lines


@on_ranks(2)
def test_shared_memory_or_nothing(rank, ddp_class):
    """Asked for by name, it is an error on all ranks, with rank and reason; the process group is still of use."""
    make, connect = shm._C.ShmEndpoint, shm._C.ShmEndpoint.connect
    for cause, reason in each([TROUBLES["no memory"], TROUBLES["no sockets"]]):
        if rank == 1:
            cause()
        with pytest.raises(RuntimeError, match=f"transport='shm' is impossible: .*rank 1: {reason}"):
            ddp_class(seeded(Mlp), transport="shm")
        shm._C.ShmEndpoint, make.connect = make, connect
        assert_trains(ddp_class(seeded(Mlp), transport="c10d"), rank)
    # Where nothing is wrong no line is logged.
    assert [wrapped(ddp_class, transport=choice)[1] for choice in ("auto", "shm", "c10d")] == [[], [], []]
    # No two ranks on a host.
    os.environ["TORCHDDP_HOST_ID"] = str(rank)
    with pytest.raises(RuntimeError, match="transport='shm' is impossible: no two ranks are on the same host"):
        ddp_class(seeded(Mlp), transport="shm")
    ddp, lines = wrapped(ddp_class)
    assert_trains(ddp, rank)
    assert ddp.reducer.transport_name == "c10d" and len(lines) == (rank == 0), lines
    assert rank == 1 or "no two ranks are on the same host" in lines[0]


@on_ranks(2)
def test_limit_that_is_no_size(rank, ddp_class):
    for text in each(["nonsense", "-1", "0", "nan", "inf"]):
        if rank == 1:
            os.environ[shm.LIMIT_ENV] = text
        with pytest.raises(RuntimeError, match=f"rank 1: {shm.LIMIT_ENV} must be .* got '{text}'"):
            ddp_class(seeded(Mlp), transport="shm")
        ddp, lines = wrapped(ddp_class)
        assert_trains(ddp, rank)
        assert ddp.reducer.transport_name == "c10d" and len(lines) == (rank == 0)


@pytest.mark.parametrize("limited", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_that_do_not_fit(ddp_class, limited, capfd):
    """The model's are 5.5 MiB: whichever rank has no room, and for whatever, all go on without."""
    limits = ["0.5", "1.5", "2", "4", "5"]

    def work(rank):
        for limit_mb in limits:
            if rank in limited:
                os.environ[shm.LIMIT_ENV] = limit_mb
            ddp, _ = wrapped(ddp_class, lambda: Mlp(WIDTH))
            assert_trains(ddp, rank, WIDTH)
            assert ddp.reducer.transport_name == "c10d"
        os.environ[shm.LIMIT_ENV] = "16"  # just enough
        ddp, _ = wrapped(ddp_class, lambda: Mlp(WIDTH))
        assert_trains(ddp, rank, WIDTH)
        assert ddp.reducer.transport_name == "shm"

    run_ranks(work, 2)
    said = capfd.readouterr().err
    for rank in range(2):
        assert said.count(f"rank {rank}: no room for") == len(limits) * (rank in limited), said


class Wide(NormNet):
    """With a buffer of 2.5 MiB, which is broadcast before each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", seeded(lambda: Mlp(64)).first.weight.detach().repeat(40, 1))


@pytest.mark.parametrize("limited", [0, 1])
@on_ranks(2)
def test_buffers_that_do_not_fit(rank, ddp_class, limited):
    if rank == limited:
        os.environ[shm.LIMIT_ENV] = "1"
    ddp, _ = wrapped(ddp_class, Wide)
    for step in range(3):
        if rank == 1:
            ddp.module.table.zero_()
        loss_of(ddp(batch(rank, step, 2, 3, 6, 6))).backward()
        assert ddp.module.table.abs().sum() > 1


class Reordered(Mlp):
    """Registered in another order than it is used in: buckets change after the first step."""

    def __init__(self):
        super().__init__(WIDTH)
        first = self.first
        del self.first
        self.register_buffer("table", torch.ones(100_000))
        self.first = first


@pytest.mark.parametrize("limited", [(0,), (1,), (0, 1)], ids=str)
@on_ranks(2)
def test_no_room_in_mid_training(rank, ddp_class, limited):
    """New buckets before the second step, while gradients still hold the old ones: there is room for one set."""
    if rank in limited:
        os.environ[shm.LIMIT_ENV] = "9"
    ddp, _ = wrapped(ddp_class, Reordered, bucket_cap_mb=3.5)
    for step in range(4):
        if rank == 1:
            ddp.module.table.zero_()
        loss = loss_of(ddp(batch(rank, step, 5, WIDTH)))
        assert ddp.module.table.sum() == 100_000
        ddp.zero_grad(set_to_none=False)
        loss.backward()
        want = expected_grads(ddp.module, lambda m, r, s=step: loss_of(m(batch(r, s, 5, WIDTH))).backward())
        assert_grads(grads_of(ddp), want)
        assert ddp.reducer.transport_name == ("c10d" if step else "shm")
