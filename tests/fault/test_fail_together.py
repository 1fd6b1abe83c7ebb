"""torchddp.fail_together: an exception that escapes one rank's training loop ends all ranks' loops."""

import contextlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.distributed.test_reducer_status import Branching
from tests.harness import on_ranks, run_outcomes, run_ranks
from tests.models import Mlp, batch, loss_of, seeded
from torchddp.averaging import PeriodicAverager
from torchddp.diagnose.fail_together import PeerFailedError

LIMIT_S = 5.0
LONG_S = 30.0
FAULT_STEP = 2
TEXT = "no such file: shard-0001.tar"


class Fragile(Branching):
    """An Mlp that fails in forward or backward on request."""

    fails_in = ""

    def forward(self, x):
        if self.fails_in == "forward":
            raise ValueError(TEXT)
        self.message = TEXT if self.fails_in == "backward" else ""
        return super().forward(x)


def batches(rank, failing):
    step = 0
    while True:
        if failing and step == FAULT_STEP:
            raise ValueError(TEXT)
        yield batch(rank, step, dtype=torch.float32)
        step += 1


def train(rank, culprit, where, **options):
    """Trains until the rank `culprit` fails."""
    model = torchddp.DistributedDataParallel(seeded(Fragile).float(), bucket_cap_mb=0.001, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torchddp.fail_together():
        for step, inputs in enumerate(batches(rank, rank == culprit and where == "loader")):
            failing = rank == culprit and step == FAULT_STEP
            model.module.fails_in = where if failing else ""
            loss = loss_of(model(inputs))
            loss.backward()
            if failing and where == "optimizer":
                optimizer.param_groups[0]["lr"] = None
            optimizer.step()
            if failing and where == "between":
                raise ValueError(TEXT)


def ending(body, *args, **kwargs):
    """How a body ended: the error's type, text, cause and attributes, and the time on a system-wide clock."""
    kind, said, cause, about = "", "", "", {}
    try:
        body(*args, **kwargs)
    except BaseException as error:
        kind, said, cause, about = type(error).__name__, str(error), type(error.__cause__).__name__, vars(error)
    return SimpleNamespace(kind=kind, said=said, cause=cause, at_s=time.monotonic(), **about)


def assert_told(endings, culprit, text=TEXT, kind="ValueError"):
    first = endings[culprit]
    assert first.kind == kind and text in first.said, first
    for end in (end for rank, end in enumerate(endings) if rank != culprit):
        assert end.kind == "PeerFailedError", end
        assert (end.rank, end.exception_type) == (culprit, kind), end
        assert text in end.message and f"rank {culprit} failed" in end.said and text in end.said, end
        assert end.at_s - first.at_s < LIMIT_S, end


WHERE = ["forward", "backward", "optimizer", "between", "loader"]
NOT_THOROUGH = ("forward-2-c10d-None", "backward-2-shm-None", "optimizer-2-c10d-int8", "backward-3-c10d-None")


@pytest.mark.rest_is_thorough(*NOT_THOROUGH)
@pytest.mark.parametrize(("transport", "hook"), [("c10d", None), ("shm", None), ("c10d", "int8"), ("shm", "int8")])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("where", WHERE)
def test_an_exception_anywhere_ends_all(transport, hook, world_size, where):
    culprit = world_size - 1
    options = {"transport": transport} | ({"comm_hook": hook} if hook else {})
    endings = run_ranks(lambda rank: ending(train, rank, culprit, where, **options), world_size)
    kind, text = ("TypeError", "") if where == "optimizer" else ("ValueError", TEXT)
    assert_told(endings, culprit, text, kind)
    for end in endings[:culprit]:
        assert end.cause in ("TransportError", "PeerFailedError", "RuntimeError"), end
        assert kind in end.remote_traceback and "test_fail_together.py" in end.remote_traceback
        assert "at step" in end.said


def spin_in_python():
    while True:
        sum(range(100))


def multiply():
    a = torch.randn(300, 300)
    until_s = time.monotonic() + LONG_S
    while time.monotonic() < until_s:
        a = (a @ a).clamp(-1, 1)


def average_for_ever():
    averager = PeriodicAverager(seeded(Mlp).float(), period=1)
    while True:
        averager.average_parameters()


@pytest.mark.parametrize("body", [spin_in_python, multiply, average_for_ever])
def test_peers_that_compute_or_average_are_interrupted(body):
    def loop(rank):
        with torchddp.fail_together():
            if rank == 1:
                if body is average_for_ever:
                    PeriodicAverager(seeded(Mlp).float(), period=1).average_parameters()
                time.sleep(0.3)
                raise ValueError(TEXT)
            body()

    endings = run_ranks(lambda rank: ending(loop, rank), 3)
    assert_told(endings, 1)
    assert endings[0].cause == ("TransportError" if body is average_for_ever else "PeerFailedError")


def swallow_everything():
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass


def in_a_barrier():
    dist.barrier()


@pytest.mark.parametrize("body", [in_a_barrier, pytest.param(swallow_everything, marks=pytest.mark.slow)])
def test_a_rank_that_cannot_be_interrupted_is_killed(body, capfd):
    def loop(rank):
        with torchddp.fail_together(grace_s=1.0):
            if rank == 1:
                time.sleep(0.3)
                raise ValueError(TEXT)
            body()

    def work(rank):
        result = ending(loop, rank)
        time.sleep(2.5)  # the connections stay open: closing them would end the barrier
        return result

    since_s = time.monotonic()
    outcomes = run_outcomes(work, 2, timeout=20, straggler_s=10)
    assert time.monotonic() - since_s < 0.3 + LIMIT_S + 2.5
    assert outcomes[0].exit_code == 1 and "died without an error message" in outcomes[0].error, outcomes[0]
    assert outcomes[1].value.kind == "ValueError", outcomes[1]
    said = capfd.readouterr().err
    for part in ("rank 0 ends with exit code 1", "rank 1 failed", TEXT, body.__name__):
        assert part in said, said


def test_two_ranks_that_fail_at_once():
    """Each keeps its own error, and all others report the same one of the two."""

    def loop(rank):
        with torchddp.fail_together():
            if rank in (1, 2):
                raise ValueError(f"{TEXT} of rank {rank}")
            spin_in_python()

    endings = run_ranks(lambda rank: ending(loop, rank), 4)
    assert [end.kind for end in endings[1:3]] == ["ValueError"] * 2
    named = {endings[rank].rank for rank in (0, 3)}
    assert len(named) == 1 and named <= {1, 2}, endings
    assert f"{TEXT} of rank {named.pop()}" in endings[0].said


def test_what_ends_a_loop_and_what_does_not():
    """Several loops in sequence over the same group: boards are numbered equally on all ranks."""

    def raising(rank, error):
        with torchddp.fail_together():
            if rank == 1:
                raise error
            spin_in_python()

    def work(rank):
        found = {}
        for error in (KeyboardInterrupt(), SystemExit(3), SystemExit("bad config")):
            dist.barrier()
            found[repr(error)] = ending(raising, rank, error)
        # Exceptions caught inside the loop and exits with status 0 end no other rank.
        with torchddp.fail_together():
            for _ in range(3):
                with contextlib.suppress(ValueError):
                    if rank == 1:
                        raise ValueError(TEXT)
                dist.barrier()
        found["good exit"] = ending(lambda: raising(1 if rank == 1 else 2, SystemExit(0)) if rank == 1 else None)
        dist.barrier()
        time.sleep(0.6)
        return found

    found = run_ranks(work, 2)
    good = [ranks.pop("good exit").kind for ranks in found]
    for error in found[0]:
        assert_told([ranks[error] for ranks in found], 1, "", error.partition("(")[0])
    assert good == ["", "SystemExit"]


@on_ranks(2)
def test_no_error_is_raised_after_the_end(rank):
    """Ranks leave just as another fails: the error is raised by the context or not at all."""
    for attempt in range(4):
        with contextlib.suppress(PeerFailedError, ValueError), torchddp.fail_together():
            if rank == 1:
                raise ValueError(TEXT)
            until_s = time.monotonic() + 0.2 + 0.04 * attempt
            while time.monotonic() < until_s:
                pass
        for _ in range(20_000):  # Python code that a late error would interrupt
            sum(range(3))
        dist.barrier()
    time.sleep(0.5)


def test_a_dead_peer_is_still_named():
    def loop(rank):
        model = torchddp.DistributedDataParallel(seeded(Mlp).float(), transport="shm", bucket_cap_mb=0.001)
        with torchddp.fail_together():
            for step in range(100):
                if step == FAULT_STEP and rank == 1:
                    os._exit(7)
                if rank == 2 and step == FAULT_STEP:
                    spin_in_python()
                loss_of(model(batch(rank, step, dtype=torch.float32))).backward()

    first, _, last = run_ranks(lambda rank: ending(loop, rank), 3, needed_ranks=[0, 2], timeout=30)
    assert first.kind == "TransportError" and "rank 1 died" in first.said, first
    assert last.kind == "PeerFailedError" and "rank 1 died" in last.said and last.rank == 0, last


def test_nested_and_in_another_thread():
    def loop(rank):
        with torchddp.fail_together():
            try:
                with torchddp.fail_together():
                    if rank == 0:
                        raise ValueError(TEXT)
                    spin_in_python()
            finally:
                time.sleep(0.05)

    def work(rank):
        with ThreadPoolExecutor() as thread:
            return thread.submit(ending, loop, rank).result(LIMIT_S + 3)

    assert_told(run_ranks(work, 3), 0)


def test_one_rank_forks_and_no_group():
    with torchddp.fail_together(), pytest.raises(ValueError, match="own"):
        raise ValueError("own")

    def alone(rank):
        with pytest.raises(ValueError, match="own"), torchddp.fail_together():
            raise ValueError("own")

    run_ranks(alone, 1)

    def work(rank):
        with torchddp.fail_together():
            if (child := os.fork()) == 0:
                try:
                    torchddp.fail_together().__enter__()
                    raise ValueError(TEXT)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            dist.barrier()
            time.sleep(0.6)

    run_ranks(work, 2)


def test_a_body_that_creates_the_process_group():
    def work(rank):
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()

        def body():
            with torchddp.fail_together() as watch:
                watch.start()  # does nothing without a group
                dist.init_process_group("gloo", store=dist.PrefixStore("own", store), rank=rank, world_size=2)
                watch.start()
                watch.start()
                if rank == 0:
                    raise ValueError(TEXT)
                while True:
                    time.sleep(0.01)

        return ending(body)

    assert_told(run_ranks(work, 2, timeout=LONG_S), 0)


def test_a_store_that_is_down_is_logged_once(caplog):
    class Down:
        def set_timeout(self, timeout):
            pass

        def __getattr__(self, name):
            raise RuntimeError("connection refused")

    def work(rank):
        from torchddp.transport import board

        class Lost(board.Board):
            def __init__(self, *args):
                super().__init__(*args)
                self._store = Down()

        from torchddp.diagnose import fail_together as module

        module.Board = Lost
        with caplog.at_level(logging.WARNING):
            with torchddp.fail_together():
                time.sleep(0.6)
            with pytest.raises(ValueError, match="own"), torchddp.fail_together():
                raise ValueError("own")
        return [record.getMessage() for record in caplog.records if "store" in record.getMessage()]

    for told in run_ranks(work, 2):
        assert len(told) == 2, told  # once per context
        assert "fail_together on rank" in told[0]


@on_ranks(2)
def test_a_normal_end_waits_for_no_rank_and_a_context_is_entered_once(rank):
    since_s = time.monotonic()
    with torchddp.fail_together():
        time.sleep(rank)
    assert rank == 1 or time.monotonic() - since_s < 0.5
    dist.barrier()
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="grace_s must be"):
            torchddp.fail_together(grace_s=wrong)
    context = torchddp.fail_together()
    with context:
        pass
    with pytest.raises(RuntimeError, match="once"), context:
        pass
