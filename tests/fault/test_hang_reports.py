"""Ranks that wait for a missing rank: one report says which, what, where and why, and then all raise."""

import json
import logging
import os
import re
import signal
import stat
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.distributed.test_threads import Branching
from tests.fault.hanging_programs import named_by_torch
from tests.harness import future_of, keep_alive, run_ranks
from tests.models import Mlp, batch, loss_of, seeded, step_on
from tests.unit.helpers import wait_until
from torchddp import Checks
from torchddp.diagnose import diagnosis, monitor
from torchddp.diagnose.flight_recorder import FOLDER_ENV

STALL_S = 2.0  # longer than a busy machine keeps a rank waiting
TIMEOUT_S = 12.0  # of a reduction or a group: a report must come first, also on a busy machine
slow = pytest.mark.slow

pytestmark = pytest.mark.beyond_torch("torch's class waits in silence")


@pytest.fixture(autouse=True)
def one_report(monkeypatch):
    """No hang lasts long enough to be reported again."""
    monkeypatch.setattr(monitor, "_AGAIN", TIMEOUT_S / STALL_S + 1)


class Reports(logging.Handler):
    """The reports that this rank logged; report files are written to the folder."""

    def __init__(self, folder):
        super().__init__()
        os.environ[diagnosis.FOLDER_ENV] = str(folder)
        self.texts = []
        logging.getLogger("torchddp.hang").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def is_reported(folder):
    """Whether there is a report, which all ranks have after ``STALL_S`` more."""
    return any(folder.glob("torchddp-hang-*.json"))


def raised(ddp, rank, step, _):
    ddp.module.message = "no such number"
    with pytest.raises(ValueError):
        step_on(ddp, rank, step)


def raised_in_forward(ddp, rank, step, _):
    with pytest.raises(RuntimeError, match="shapes"):
        ddp(batch(rank, step)[:, :3])


def died(ddp, rank, step, _):
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(ddp, rank, step, _):
    os.kill(os.getpid(), signal.SIGSTOP)


def took_another_branch(ddp, rank, step, _):
    ddp.module.leaves_out = True
    step_on(ddp, rank, step)


def skipped_a_batch(ddp, rank, step, _):
    pass


def entered_another_collective(ddp, rank, step, other):
    loss = loss_of(ddp(batch(rank, step)))
    with pytest.raises(RuntimeError):  # the others have left by then
        dist.all_reduce(loss.detach(), group=other)


BUCKET = r"rank C has not produced middle\.bias, middle\.weight \(bucket 1 of 3, step 4\); "
IS_OVER = "its backward is over: it raised an error, or the loss does not depend on "
WHERE = r"test_hang_reports\.py:\d+ in (_rank|is_reported)"  # where the culprit then waits
# The report's text about the culprit, C, in the fourth step.
EXPECTED = {
    raised: BUCKET + IS_OVER + r"middle\.bias, .* " + WHERE,
    raised_in_forward: r"rank C has not ended the forward of step 4; it left forward with RuntimeError: mat1",
    died: r"rank C is dead: its process is gone \(process \d+ on",
    stopped: r"rank C is stopped, by a signal or a debugger \(process \d+ on",
    took_another_branch: BUCKET + IS_OVER + r"middle\.bias, .* " + WHERE,
    skipped_a_batch: r"rank C has finished step 3 \(.*at 4\): .* skipped a batch, .* " + WHERE,
    entered_another_collective: r"rank C has not produced last\.weight \(bucket 0 of 3, step 4\); its backward has "
    r"produced none yet; it is in all_reduce at test_hang_reports\.py:\d+ \(group ",
}


def _rank(rank, culprit, case, transport, folder):
    reports = Reports(folder)
    other = dist.new_group(timeout=timedelta(seconds=3 * TIMEOUT_S))
    ddp = torchddp.DistributedDataParallel(
        seeded(Branching), bucket_cap_mb=0.001, transport=transport, timeout=timedelta(seconds=TIMEOUT_S),
        checks=Checks(stall_report=STALL_S),
    )  # fmt: skip
    first_step = 3
    for step in range(first_step):
        step_on(ddp, rank, step)
    if rank == culprit:
        case(ddp, rank, first_step, other)
        while not is_reported(folder):  # it stays connected, in this function
            time.sleep(0.02)
        time.sleep(STALL_S)
        return reports.texts, None
    with pytest.raises(torchddp.TransportError) as caught:
        for step in range(4):
            step_on(ddp, rank, first_step + step)
    time.sleep(0.5)
    return reports.texts, str(caught.value)


def run_case(case, transport, world_size, culprit, folder):
    needed = [rank for rank in range(world_size) if rank != culprit or case not in (died, stopped)]
    found = run_ranks(_rank, world_size, culprit, case, transport, folder, needed_ranks=needed)
    return [found[rank] for rank in needed]


def check_report(values, case, culprit, folder):
    """Exactly one rank logs a report; all errors and the file contain it."""
    printed = [text for texts, _ in values for text in texts]
    assert len(printed) == 1, printed
    headline = printed[0].partition("\n")[0].removeprefix("torchddp hang report: ")
    assert re.search(EXPECTED[case].replace("C", str(culprit), 1), headline), printed[0]
    assert re.search(r"ranks? [\d, and-]+ ha(s|ve) waited [\d.]+ s$", headline), headline
    for error in (error for _, error in values if error is not None):
        assert f"Hang report: {headline}" in error, error
    files = list(folder.glob("torchddp-hang-*.json"))
    assert len(files) == 1 and str(files[0]) in printed[0]
    told = json.loads(files[0].read_text())
    assert told["headline"] == headline and [c["rank"] for c in told["culprits"]] == [culprit]
    assert sorted(state["rank"] for state in told["ranks"]) == list(range(len(told["ranks"])))
    assert all(frame[1] > 0 for state in told["ranks"] for frame in state["stack"])
    return told


CASES = [
    (raised, "c10d", 2, 0),
    (skipped_a_batch, "shm", 4, 3),
]
SLOW_CASES = [
    (raised_in_forward, "shm", 2, 1),
    (stopped, "shm", 3, 0),
    (took_another_branch, "c10d", 2, 1),
    (entered_another_collective, "shm", 2, 0),
]
THOROUGH_CASES = [
    (took_another_branch, "shm", 3, 2),
    (skipped_a_batch, "c10d", 3, 1),
    (entered_another_collective, "c10d", 3, 2),
]


@pytest.mark.parametrize(
    ("case", "transport", "world_size", "culprit"),
    [
        *CASES,
        *(pytest.param(*case, marks=slow) for case in SLOW_CASES),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH_CASES),
    ],
)
def test_the_culprit_is_named(case, transport, world_size, culprit, tmp_path, monkeypatch):
    """By torch's analyzer, too."""
    monkeypatch.setenv(FOLDER_ENV, str(tmp_path / "traces"))
    check_report(run_case(case, transport, world_size, culprit, tmp_path), case, culprit, tmp_path)
    (traces,) = (tmp_path / "traces").iterdir()
    found, text = named_by_torch(traces)
    assert "collective: gloo:all_reduce of bucket " in text and "sequence number: 4" in text
    # If one of two ranks hangs in a call, each of the two groups misses the other rank.
    assert found == {culprit} or (case is entered_another_collective and world_size == 2), text


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("hook", r"is in the communication hook of bucket 0 of 1 \(step 3\); it is at "),
        ("refresh_trainable", "has left step 2, .*it is at "),
    ],
    ids=["hook", "refresh_trainable"],
)
def test_a_rank_that_is_late_in_a_hook_or_between_steps(where, words, tmp_path):
    def work(rank):
        def late():
            wait_until(lambda: rank == 0 or is_reported(tmp_path), 2 * TIMEOUT_S)

        def hook(state, bucket):
            late()
            dist.all_reduce(bucket.buffer())
            return future_of(bucket.buffer())

        reports = Reports(tmp_path)
        ddp = torchddp.DistributedDataParallel(seeded(Mlp), transport="shm", checks=Checks(stall_report=STALL_S))
        for step in range(2):
            step_on(ddp, rank, step)
        if where == "hook":
            ddp.register_comm_hook(None, hook)
            step_on(ddp, rank, 2)
        else:
            late()
            getattr(ddp, where)()
        return reports.texts

    texts = [text for texts in run_ranks(work, 2) for text in texts]
    there = r"(helpers\.py:\d+ in wait_until|test_hang_reports\.py:\d+ in (<lambda>|is_reported))"
    assert len(texts) == 1 and re.search(f"rank 1 {words}{there}; rank 0 has waited", texts[0]), texts


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_dead_rank(transport, tmp_path):
    """Its connections close, so the others may raise before a report is due."""
    values = run_case(died, transport, 2, 1, tmp_path)
    if any(texts for texts, _ in values):
        check_report(values, died, 1, tmp_path)


def monitor_of(ddp):
    reports = ddp.observers.get("hang_reports")
    return None if reports is None else reports.monitor


def test_no_report_without_a_stall(tmp_path):
    """Delays below the limit, buffers, a deleted model and a destroyed group are not logged anywhere."""

    def work(rank):
        reports = Reports(tmp_path)
        logging.getLogger("torchddp").setLevel(logging.WARNING)
        logging.getLogger("torchddp").addHandler(reports)
        ddp = torchddp.DistributedDataParallel(
            torch.nn.Sequential(seeded(Mlp), torch.nn.BatchNorm1d(8, dtype=torch.float64)),
            checks=Checks(stall_report=10 * STALL_S),
        )
        monitor = monitor_of(ddp)
        for step in range(8):
            if rank == 1:
                time.sleep(0.1)
            step_on(ddp, rank, step)
        assert len(monitor._models) == 1
        del ddp
        assert wait_until(lambda: not monitor._models)
        assert monitor_of(torchddp.DistributedDataParallel(seeded(Mlp), checks=Checks(stall_report=0))) is None
        other = torchddp.DistributedDataParallel(seeded(Mlp))
        assert monitor_of(other) is monitor  # shared by all models of the process
        assert other.observers.get("hang_reports").stall_s == 10.0  # a third of the group's timeout
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.3)
        return reports.texts

    assert run_ranks(work, 2, group_timeout_s=30.0) == [[], []]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("in_the_way", ["file", "link"])
def test_reports_are_private_to_the_user(in_the_way, tmp_path, monkeypatch):
    """In a shared folder no existing link is followed, no file overwritten, and no report readable by others."""
    theirs, target = tmp_path / "tmp", tmp_path / "of_the_user"
    theirs.mkdir()
    target.write_text("precious")
    monkeypatch.setenv(diagnosis.FOLDER_ENV, str(theirs))
    monkeypatch.setattr(diagnosis.secrets, "token_hex", lambda _: "guessed")
    report = diagnosis.Finding("x", 4, [], [], 0.0, ""), [], 0
    first = diagnosis.write_report(*report)
    assert first is not None and stat.S_IMODE(first.stat().st_mode) == 0o600
    first.unlink()
    # The same names, which now exist.
    monkeypatch.setattr(diagnosis.time, "strftime", lambda _: first.name.removeprefix("torchddp-hang-")[:15])
    for name in (first, first.with_name(f"{first.name}.guessed.part")):
        name.symlink_to(target) if in_the_way == "link" else name.write_text("theirs")
    assert diagnosis.write_report(*report) is None
    assert target.read_text() == "precious" and first.read_text() in ("precious", "theirs")
    monkeypatch.undo()
    monkeypatch.setenv(diagnosis.FOLDER_ENV, str(theirs))
    assert diagnosis.write_report(*report) is not None
    assert target.read_text() == "precious"


def test_a_stall_that_ends_while_ranks_are_asked(tmp_path):
    """A rank is repeatedly late until just before a report is due: there is no report, or one that names it."""

    def work(rank):
        reports = Reports(tmp_path)
        ddp = torchddp.DistributedDataParallel(seeded(Mlp), checks=Checks(stall_report=STALL_S))
        for step in range(2):
            if rank == 1:
                time.sleep(STALL_S + 0.03 * step)
            step_on(ddp, rank, step)
        dist.barrier()
        time.sleep(0.3)
        return reports.texts

    for texts in run_ranks(work, 2):
        assert all("hang report: rank 1 " in text and "rank 1 has waited" not in text for text in texts), texts


@slow
def test_the_process_that_hosts_the_store_is_stopped(tmp_path):
    """torch's store client then waits forever, so each rank reports what it knows by itself."""

    def work(rank):
        reports = Reports(tmp_path)
        port = [0]
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = [store.port]
        dist.broadcast_object_list(port)
        dist.barrier()
        dist.destroy_process_group()
        if rank > 0:
            store = dist.TCPStore("127.0.0.1", port[0], is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        keep_alive(dist.group.WORLD)  # destroying it would wait for the hanging reduction
        ddp = torchddp.DistributedDataParallel(
            seeded(Mlp), transport="c10d", timeout=timedelta(seconds=20), checks=Checks(stall_report=STALL_S)
        )
        step_on(ddp, rank)
        wait_until(lambda: len(monitor_of(ddp)._known) == 3)
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(torchddp.TransportError, match=f"Hang report of rank {rank} alone: rank 0 is stopped"):
            for step in range(3):
                step_on(ddp, rank, 1 + step)
        return reports.texts

    found = run_ranks(work, 3, needed_ranks=[1, 2])
    for rank in (1, 2):
        (text,) = found[rank]
        assert re.search(rf"rank 0 is stopped, .* \(process \d+ on .*\); rank {rank} has waited [\d.]+ s\n", text), text
        assert f"rank {rank} can't ask the other ranks: the process group's store does not answer" in text
