"""torchddp.fail_together: an exception that leaves one rank's training loop ends all ranks."""

import contextlib
import ctypes
import logging
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

import torchddp
from tests.distributed.test_threads import Branching
from tests.harness import gathered, logged, on_ranks, run_outcomes, run_ranks
from tests.models import Mlp, batch, loss_of, seeded
from tests.unit.helpers import wait_until
from torchddp.diagnose import fail_together as module
from torchddp.transport import store
from torchddp.transport.waits import GONE, look_up, process_identity

LIMIT_S = 120.0  # a guard against hangs
LONG_S = 300.0  # longer than any test may take
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
    with torchddp.fail_together(grace_s=LONG_S):
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


WHERE = ["forward", "backward", "optimizer", "between", "loader"]
NOT_THOROUGH = ("forward-2-c10d-None", "backward-2-shm-None", "optimizer-2-c10d-int8", "backward-3-c10d-None")


@pytest.mark.rest_is_thorough(*NOT_THOROUGH)
@pytest.mark.parametrize(("transport", "hook"), [("c10d", None), ("shm", None), ("c10d", "int8"), ("shm", "int8")])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("where", WHERE)
def test_a_rank_whose_peer_is_gone_says_why(transport, hook, world_size, where):
    """Ranks that wait for the failed one in a step leave with an error of their own, and it names the cause."""
    culprit = world_size - 1
    options = {"transport": transport} | ({"comm_hook": hook} if hook else {})
    endings = run_ranks(lambda rank: ending(train, rank, culprit, where, **options), world_size)
    kind, text = ("TypeError", "") if where == "optimizer" else ("ValueError", TEXT)
    assert_told(endings, culprit, text, kind)
    for end in endings[:culprit]:
        assert end.cause in ("TransportError", "RuntimeError"), end
        assert kind in end.remote_traceback and "test_fail_together.py" in end.remote_traceback
        assert "after step" in end.said


def in_a_barrier():
    dist.barrier()


def asleep():
    time.sleep(LONG_S)


def in_a_long_operator():
    a = torch.ones(2000, 2000)
    while True:
        a = a @ a


def swallowing_everything():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def with_stdout_closed():
    sys.stdout = None
    time.sleep(LONG_S)


@pytest.mark.parametrize("body", [in_a_barrier, asleep, in_a_long_operator, swallowing_everything, with_stdout_closed])
def test_a_rank_that_does_not_leave_is_ended(body, capfd):
    def loop(rank):
        with torchddp.fail_together(grace_s=0.5):
            if rank == 1:
                raise ValueError(TEXT)
            body()

    def work(rank):
        logging.getLogger("torchddp").addHandler(logging.StreamHandler())  # which a program has without pytest
        processes = gathered(process_identity())
        result = ending(loop, rank)
        # The connections stay open: closing them would end the barrier.
        assert wait_until(lambda: look_up(processes[0]) == GONE, LIMIT_S)
        return result

    outcomes = run_outcomes(work, 2, straggler_s=LIMIT_S)
    assert outcomes[0].exit_code == 1 and "died without an error message" in outcomes[0].error, outcomes[0]
    assert outcomes[1].value.kind == "ValueError", outcomes[1]
    said = capfd.readouterr().err
    # The report, and then the end.
    for part in ("rank 0: rank 1 failed", TEXT, "Traceback", "rank 0 ends with exit code 1", "0.5 s", body.__name__):
        assert part in said, said
        said = said.partition(part)[2]


def test_no_rank_ends_while_one_saves(tmp_path):
    def save(processes):
        reports = logged()
        with torchddp.finish_first():
            dist.barrier()
            assert wait_until(lambda: reports, LIMIT_S)
            time.sleep(1.0)  # the grace ends
            states = [look_up(process) for process in processes]
            (tmp_path / "saved").write_text(" ".join(states))

    def loop(rank, processes):
        with torchddp.fail_together(grace_s=0.1):
            if rank == 0:
                save(processes)
            else:
                dist.barrier()
            if rank == 1:
                raise ValueError(TEXT)
            asleep()

    outcomes = run_outcomes(lambda rank: ending(loop, rank, gathered(process_identity())), 3, straggler_s=LIMIT_S)
    assert (tmp_path / "saved").read_text() == "running running running"
    assert [outcome.exit_code for outcome in outcomes] == [1, 0, 1], outcomes
    assert outcomes[1].value.kind == "ValueError", outcomes


@pytest.mark.parametrize("dies", [False, True])
def test_a_save_takes_as_long_as_its_rank_lives(dies, tmp_path):
    silent_s = 2.0

    def loop(rank):
        module._SILENT_SAVE_S = silent_s
        with torchddp.fail_together(grace_s=0.1):
            if rank == 1:
                with torchddp.finish_first():
                    dist.barrier()
                    if dies:
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(3 * silent_s)
                    (tmp_path / "saved").touch()
                asleep()
            dist.barrier()
            if rank == 0:
                raise ValueError(TEXT)
            asleep()

    outcomes = run_outcomes(lambda rank: ending(loop, rank), 3, straggler_s=LIMIT_S)
    assert (tmp_path / "saved").exists() is not dies
    assert [outcome.exit_code for outcome in outcomes] == [0, -signal.SIGKILL if dies else 1, 1], outcomes
    assert outcomes[0].value.kind == "ValueError", outcomes


def test_lightnings_saves_in_the_background_are_held(monkeypatch):
    """With stand-ins for Lightning, which tests/clients has."""
    exceptions = SimpleNamespace(_TunerExitException=KeyError)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.utilities.exceptions", exceptions)
    path = Path(module.__file__).parents[1] / "integrations" / "lightning" / "together.py"
    together = runpy.run_path(str(path))
    holds, goes_on = [], threading.Event()
    monkeypatch.setattr(module, "_watching", [SimpleNamespace(hold=holds.append)])

    class Strategy:
        def save_checkpoint(self, background):
            if background:
                self.inner._executor.submit(goes_on.wait)

    class OurStrategy(together["FailsTogether"], Strategy):
        inner = SimpleNamespace(checkpoint_io=None, _executor=ThreadPoolExecutor(1))
        checkpoint_io = None

    strategy = OurStrategy()
    strategy.save_checkpoint(False)
    assert holds == [1, -1]
    strategy.checkpoint_io = SimpleNamespace(checkpoint_io=strategy.inner)  # a plugin around AsyncCheckpointIO
    strategy.save_checkpoint(True)
    assert holds == [1, -1, 1]
    goes_on.set()
    OurStrategy.inner._executor.shutdown()
    assert holds == [1, -1, 1, -1]


def until_told():
    reports = logged()
    assert wait_until(lambda: reports, LIMIT_S)


def test_two_ranks_that_fail_at_once():
    """Each keeps its own error, and all others report the same one of the two."""

    def loop(rank):
        with torchddp.fail_together(grace_s=LONG_S):
            if rank in (1, 2):
                raise ValueError(f"{TEXT} of rank {rank}")
            until_told()

    endings = run_ranks(lambda rank: ending(loop, rank), 4)
    assert [end.kind for end in endings[1:3]] == ["ValueError"] * 2
    named = {endings[rank].rank for rank in (0, 3)}
    assert len(named) == 1 and named <= {1, 2}, endings
    assert f"{TEXT} of rank {named.pop()}" in endings[0].said and endings[0].cause == "NoneType"


def test_what_ends_a_loop_and_what_does_not():
    """Several loops in sequence over the same group: boards are numbered equally on all ranks."""

    def raising(rank, error):
        with torchddp.fail_together(grace_s=LONG_S):
            if rank == 1:
                raise error
            until_told()

    def work(rank):
        found = {}
        full_disk = CheckpointException("write", {1: (OSError(TEXT), traceback.StackSummary())})
        for error in (KeyboardInterrupt(), SystemExit(3), SystemExit("bad config"), full_disk):
            dist.barrier()
            found[repr(error)] = ending(raising, rank, error)
        # Exceptions caught inside the loop and exits with status 0 end no other rank.
        reports = logged()
        with torchddp.fail_together():
            for _ in range(3):
                with contextlib.suppress(ValueError):
                    if rank == 1:
                        raise ValueError(TEXT)
                dist.barrier()
        with contextlib.suppress(SystemExit), torchddp.fail_together():
            if rank == 1:
                raise SystemExit(0)
            time.sleep(0.6)
        dist.barrier()
        assert not reports
        return found

    found = run_ranks(work, 2)
    for error in found[0]:
        assert_told([ranks[error] for ranks in found], 1, "", error.partition("(")[0])


def test_a_dead_peer_is_still_named():
    def loop(rank):
        model = torchddp.DistributedDataParallel(seeded(Mlp).float(), transport="shm", bucket_cap_mb=0.001)
        with torchddp.fail_together(grace_s=LONG_S):
            for step in range(100):
                if step == FAULT_STEP and rank == 1:
                    os._exit(7)
                if step == FAULT_STEP and rank == 2:
                    until_told()
                    return
                loss_of(model(batch(rank, step, dtype=torch.float32))).backward()

    first, _, last = run_ranks(lambda rank: ending(loop, rank), 3, needed_ranks=[0, 2])
    assert first.kind == "TransportError" and "rank 1 died" in first.said, first
    assert last.kind == "PeerFailedError" and "rank 1 died" in last.said and last.rank == 0, last


def test_nested_and_in_another_thread():
    def loop(rank):
        with torchddp.fail_together(grace_s=LONG_S), torchddp.fail_together(grace_s=LONG_S):
            if rank == 0:
                raise ValueError(TEXT)
            until_told()

    def work(rank):
        with ThreadPoolExecutor() as thread:
            return thread.submit(ending, loop, rank).result(LIMIT_S)

    assert_told(run_ranks(work, 3), 0)


def test_one_rank_forks_and_no_group():
    with torchddp.fail_together(), torchddp.finish_first(), pytest.raises(ValueError, match="own"):
        raise ValueError("own")

    def alone(rank):
        with pytest.raises(ValueError, match="own"), torchddp.fail_together():
            raise ValueError("own")

    run_ranks(alone, 1)

    def work(rank):
        reports = logged()
        context = torchddp.fail_together()
        with context:
            if (child := os.fork()) == 0:
                try:
                    with torchddp.finish_first():
                        context.__exit__(ValueError, ValueError(TEXT), None)
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            dist.barrier()
            time.sleep(0.6)
        assert not reports

    run_ranks(work, 2)


def test_a_body_that_creates_the_process_group():
    def work(rank):
        store = dist.distributed_c10d._get_default_store()
        dist.destroy_process_group()

        def body():
            with torchddp.fail_together(grace_s=LONG_S) as context:
                context.start()  # does nothing without a group
                dist.init_process_group("gloo", store=dist.PrefixStore("own", store), rank=rank, world_size=2)
                context.start()
                context.start()
                if rank == 0:
                    raise ValueError(TEXT)
                until_told()

        return ending(body)

    assert_told(run_ranks(work, 2), 0)


def test_a_store_that_is_down_is_logged_once(caplog):
    class Down:
        def set_timeout(self, timeout):
            pass

        def __getattr__(self, name):
            raise RuntimeError("connection refused")

    class Lost(store.Board):
        def __init__(self, *args):
            super().__init__(*args)
            self._mine = lambda _store: Down()

        def open_store(self):
            raise RuntimeError("connection refused")

    def work(rank):
        store.Board = Lost
        with caplog.at_level(logging.WARNING):
            with torchddp.fail_together(), torchddp.finish_first():
                time.sleep(0.6)
            with pytest.raises(ValueError, match="own"), torchddp.fail_together():
                raise ValueError("own")
        return [record.getMessage() for record in caplog.records if "store" in record.getMessage()]

    for told in run_ranks(work, 2):
        assert len(told) == 2, told  # once per context
        assert "fail_together on rank" in told[0]


@on_ranks(2)
def test_a_normal_end_waits_for_no_rank_and_a_context_is_entered_once(rank):
    context = torchddp.fail_together()
    with context:
        if rank == 1:
            dist.barrier()  # rank 0 gets there once it has left
    if rank == 0:
        dist.barrier()
    with pytest.raises(RuntimeError, match="once"), context:
        pass
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="grace_s must be"):
            torchddp.fail_together(grace_s=wrong)


def stuck_or_failing(rank, saves_s):
    """Rank 0 is stuck with the interpreter's lock held; rank 1 fails; rank 2, if it is there, saves for a while."""
    with torchddp.fail_together(grace_s=0.2):
        dist.barrier()
        if rank == 0:
            ctypes.PyDLL(None).usleep(int(LONG_S * 1e6))  # holds the global interpreter lock
        elif rank == 2:
            with torchddp.finish_first():
                dist.barrier(two_of_three(1, 2))
                time.sleep(saves_s)
        else:
            if dist.get_world_size() > 2:
                dist.barrier(two_of_three(1, 2))
            raise ValueError(TEXT)


def two_of_three(*ranks):
    return dist.new_group(list(ranks), use_local_synchronization=True)


@pytest.mark.parametrize("saves_s", [None, 3.0])
def test_a_rank_whose_interpreter_is_stuck_ends_too(saves_s, monkeypatch):
    """But no earlier than the end of a save elsewhere."""
    monkeypatch.setattr(module, "_STUCK_S", 0.8)
    began_s = time.monotonic()
    outcomes = run_outcomes(stuck_or_failing, 2 if saves_s is None else 3, saves_s)
    assert outcomes[0].exit_code == 1 and "died without an error message" in outcomes[0].error, outcomes
    assert "PeerFailedError" in outcomes[1].error or TEXT in outcomes[1].error
    assert (saves_s or 0.0) < time.monotonic() - began_s < LIMIT_S


def test_a_stuck_interpreter_whose_peers_live_goes_on(monkeypatch):
    monkeypatch.setattr(module, "_STUCK_S", 0.3)

    def loop(rank):
        with torchddp.fail_together(grace_s=0.2):
            ctypes.PyDLL(None).usleep(2_500_000)
            dist.barrier()

    run_ranks(loop, 2)
