"""Signal handlers run while a rank waits: an exception ends the wait; otherwise it continues."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchddp
from benchmarks.chaos.leaks import holders_of, segments_of
from tests.harness import GROUP_TIMEOUT_S, on_ranks, run_ranks
from tests.models import Mlp, assert_grads, batch, grads_of, loss_of, seeded, step_on
from tests.programs import ROOT
from torchddp import _C, TransportError
from torchddp.averaging import DiLoCo
from torchddp.transport.waits import wait_for_future, wait_for_keys

LIMIT_S = GROUP_TIMEOUT_S  # of every operation; a rank that waited for it would have hung
TRANSPORTS = ["shm", "c10d"]

pytestmark = pytest.mark.beyond_torch("torch's class runs handlers when the wait is over")


def hit(number: int = signal.SIGINT, looks: int = 20) -> None:
    """Signal this process once its main thread has slept in so many looks at it: it waits."""
    main = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/stat")
    parent = os.getpid()
    if os.fork() == 0:  # a thread would make the main one wait for the GIL
        while looks > 0:
            time.sleep(0.01)
            looks -= main.read_text().rpartition(")")[2].split()[0] == "S"
        os.kill(parent, number)
        os._exit(0)


def raised(kind: type[BaseException], call) -> BaseException:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def gives_up(call) -> None:
    """The first or second call must raise that rank 0 gave up: rank 0 has started the first."""
    error = raised(TransportError, lambda: [call(), call()])
    assert "rank 0 gave up" in str(error), error


def post(what: str) -> None:
    dist.distributed_c10d._get_default_store().set(what, "")


def await_post(what: str) -> None:
    dist.distributed_c10d._get_default_store().wait([what])


def meet(rank: int) -> None:
    """Keep both ranks' connections open until both get here."""
    post(f"rank {rank} is done")
    await_post(f"rank {1 - rank} is done")


def interrupts_rank_0(rank: int, call) -> None:
    """Interrupt rank 0 in this call; the others return after that."""
    if rank == 0:
        hit()
        raised(KeyboardInterrupt, call)
        post("rank 0 was interrupted")
    else:
        await_post("rank 0 was interrupted")


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_an_interrupt_ends_a_backward_and_leaves_the_reducer_idle(transport, rank):
    ddp = torchddp.DistributedDataParallel(seeded(Mlp), bucket_cap_mb=0.001, transport=transport)
    for step in range(2):
        step_on(ddp, rank, step)
    ddp.zero_grad()
    interrupts_rank_0(rank, lambda: step_on(ddp, rank, 2))
    if rank == 0:
        status = ddp.reducer.status()
        assert status["phase"] == "idle" and not status["armed"], status
        ddp.zero_grad()
        with ddp.no_sync():
            step_on(ddp, rank, 3)
        plain = seeded(Mlp)
        loss_of(plain(batch(rank, 3))).backward()
        assert_grads(grads_of(ddp), grads_of(plain))
    elif transport == "shm":
        gives_up(lambda: step_on(ddp, rank, 2))
    meet(rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_operations_after_an_interrupt_fail_at_once(transport, rank):
    """In the forward that rebuilds buckets, another collective would be matched with an earlier one of the peers."""
    ddp = torchddp.DistributedDataParallel(seeded(Mlp), bucket_cap_mb=0.001, transport=transport)
    step_on(ddp, rank, 0)
    interrupts_rank_0(rank, lambda: step_on(ddp, rank, 1))
    if rank == 0:
        with ddp.no_sync():
            step_on(ddp, rank, 2)
        error = raised(TransportError, lambda: step_on(ddp, rank, 3))
        assert "gave up" in str(error), error
    meet(rank)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_wait_continues_after_a_handler_returns(transport):
    def work(rank):
        ddp = torchddp.DistributedDataParallel(seeded(Mlp), transport=transport)
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: post("the handler has run"))
            hit(signal.SIGTERM)
        else:
            await_post("the handler has run")  # before this rank joins
        step_on(ddp, rank)
        return grads_of(ddp)

    first, second = run_ranks(work, 2)
    assert_grads(first, second, rtol=0)


class Promised:
    """A hook whose future never completes."""

    def __init__(self):
        self.futures = []

    def __call__(self, _state, _bucket):
        self.futures.append(torch.futures.Future())
        return self.futures[-1]


@on_ranks(1)
def test_an_interrupt_ends_the_wait_for_a_hook(rank):
    ddp = torchddp.DistributedDataParallel(seeded(Mlp), transport="c10d")
    ddp.register_comm_hook(None, Promised())
    hit()
    raised(KeyboardInterrupt, lambda: step_on(ddp, rank))
    assert ddp.reducer.status()["phase"] == "idle"


@pytest.mark.rest_is_thorough("its own timeout")
@pytest.mark.parametrize("own", [True, False], ids=["its own timeout", "the group's"])
def test_the_wait_for_a_hook_that_never_completes_times_out(own):
    def work(rank):
        options = {"timeout": timedelta(seconds=2)} if own else {}
        ddp = torchddp.DistributedDataParallel(seeded(Mlp), transport="c10d", **options)
        ddp.register_comm_hook(None, Promised())
        error = str(raised(TransportError, lambda: step_on(ddp, rank)))
        limit = "2000 ms, the timeout of this DistributedDataParallel" if own else "8000 ms, the timeout of the process"
        for part in ("rank 0, step 1", "bucket 0 of 1", "'first.weight'", "hook's future was not completed", limit):
            assert part in error, error
        assert ddp.reducer.status()["phase"] == "idle"
        if own:  # also futures queued after backward
            other = torchddp.DistributedDataParallel(seeded(Mlp), transport="c10d", **options)
            other.reducer._install_post_backward_futures([torch.futures.Future()])
            error = str(raised(TransportError, lambda: step_on(other, rank)))
            assert "rank 0, step 1: what was queued after backward (1 of 1) failed" in error, error

    run_ranks(work, 1, group_timeout_s=LIMIT_S if own else 8.0)


@on_ranks(2, backend="torchddp_shm")
def test_an_interrupt_ends_a_collective_of_the_shared_memory_backend(rank):
    dist.all_reduce(torch.ones(3))
    interrupts_rank_0(rank, lambda: dist.all_reduce(torch.ones(100_000)))
    if rank == 1:
        gives_up(lambda: dist.all_reduce(torch.ones(100_000)))
    meet(rank)


@on_ranks(1)
def test_an_interrupt_ends_the_wait_for_ranks_to_connect(rank):
    own, other = _C.ShmEndpoint(0), _C.ShmEndpoint(0)  # the other endpoint listens but never connects
    hit()
    raised(
        KeyboardInterrupt,
        lambda: own.connect(
            None, local_ranks=[0, 1], addresses=[own.address, other.address], outer_group=None, places=[0, 1],
            outer_ranks=[], owners=2, spans=False,
            connect_timeout=timedelta(seconds=LIMIT_S), timeout=timedelta(seconds=LIMIT_S),
        ),
    )  # fmt: skip


@on_ranks(1)
def test_an_interrupt_ends_waits_for_the_store_and_for_jobs_of_a_thread(rank):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hit(looks=60)  # while it waits again
    raised(KeyboardInterrupt, lambda: wait_for_keys(store, ["never"], timedelta(seconds=LIMIT_S)))
    raised(RuntimeError, lambda: wait_for_keys(store, ["never"], timedelta(seconds=0.6)))
    store.set("there", "x")
    wait_for_keys(store, ["there"], timedelta(seconds=LIMIT_S))
    future = torch.futures.Future()
    hit()
    raised(KeyboardInterrupt, lambda: wait_for_future(future, LIMIT_S))
    assert not wait_for_future(future, 0.01)
    future.set_result(1)
    assert wait_for_future(future, LIMIT_S)


@on_ranks(2)
def test_an_interrupt_ends_the_wait_for_an_average(rank):
    model = seeded(Mlp).float()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DiLoCo(model, sgd, sync_every=1)
    loss_of(model(batch(rank, dtype=torch.float32))).backward()
    interrupts_rank_0(rank, optimizer.step)


@pytest.mark.rest_is_thorough("c10d-*")
@pytest.mark.parametrize(
    ("transport", "number", "code"), [("c10d", signal.SIGTERM, 3), ("shm", signal.SIGINT, -signal.SIGINT)]
)
def test_the_process_exits_and_its_peers_raise(transport, number, code):
    """The interpreter shuts down after destroy_process_group(), while gloo's operation is still in flight."""
    with tempfile.TemporaryDirectory(prefix="torchddp_test_") as folder:
        ranks = [_start(rank, transport, folder) for rank in range(2)]
        try:
            for rank in ranks:
                assert rank.stdout.readline() == "ready\n"
            segments = segments_of(ranks[0].pid)
            assert bool(segments) == (transport == "shm")
            time.sleep(0.3)
            ranks[0].send_signal(number)
            assert ranks[0].wait(LIMIT_S) == code
            told, _ = ranks[1].communicate("go\n", timeout=LIMIT_S)
            assert told.startswith("TransportError"), told
            assert not holders_of(segments)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()


def _start(rank, transport, folder):
    command = [sys.executable, "-m", "tests.fault.interrupted_rank", str(rank), transport, f"{folder}/store"]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
