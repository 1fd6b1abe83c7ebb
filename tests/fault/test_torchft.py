"""With the real torchft: a lighthouse, replica processes, SIGKILL during training."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fault.torchft_processes import ROOT, Child, free_port, lighthouse
from tests.fault.torchft_run import run_once

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed: pip install torchft"
)
QUIET = {"RUST_LOG": "error"}


def last_words(command, log, address, count=2):
    """Run replicas of the command, each with its own name, and return their last lines."""
    environment = {**QUIET, "TORCHFT_LIGHTHOUSE": address}
    children = []
    try:
        for index in range(count):
            named = [word.replace("NAME", f"replica_{index}") for word in command]
            children.append(Child([sys.executable, "-m", *named], {**environment, "REPLICA_GROUP_ID": str(index)}, log))
        return [_last(child, time.monotonic() + 300) for child in children]
    finally:
        for child in children:
            child.kill()


def _last(child, deadline_s):
    words = []
    while not {"weights", "syncs"} & set(words):
        words = child.next_line(deadline_s)
    return words


def test_the_example_trains_two_replicas_to_equal_weights(tmp_path):
    with (tmp_path / "log").open("w") as log, lighthouse(log, min_replicas=2) as address:
        ends = last_words(["examples.train_torchft", "--steps", "30"], log, address)
    assert [end[2] for end in ends] == ["30,", "30,"], (tmp_path / "log").read_text()
    assert ends[0][-1] == ends[1][-1]


@pytest.mark.slow
def test_a_missing_lighthouse_is_reported():
    environment = {**os.environ, **QUIET, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{free_port()}"}
    command = [sys.executable, "-m", "examples.train_torchft"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "RuntimeError: no lighthouse answers at http://127.0.0.1" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["buckets", *(pytest.param(k, marks=pytest.mark.thorough) for k in ("pure", "powersgd"))]
)
def test_one_dies_in_backward_and_heals(tmp_path, kind):
    # torchft 0.2.0's own class crashes here, in the survivor of a reduction whose peer died.
    run = run_once(1, tmp_path, kind=kind)
    assert run.phase == "backward"
    assert run.ok, f"{run}\n{_tail(tmp_path / 'run1.log')}"
    assert run.discarded > 0  # a reduction did fail


def _group(name, folder, address, log):
    """A replica group of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "-m", "tests.fault.group_replica", str(folder), name]
    return Child(command, {**QUIET, "TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}, log)


def _step_together(child, count, deadline_s):
    """Rank 0's step after ``count`` steps with the other group, and the process id of rank 1."""
    done, other = 0, None
    while True:
        rank, pid, what, step, *rest = child.next_line(deadline_s)
        assert what == "step"
        if rank == "1":
            other = int(pid)
        elif rest == ["2", "1"]:
            done += 1
            if done >= count and other is not None:
                return int(step), other


@pytest.mark.slow
@pytest.mark.thorough
def test_a_replica_group_of_two_ranks_loses_one_and_heals(tmp_path):
    """Each rank of a group has its own manager, whose peers are the same rank of the other groups."""
    limit_s = time.monotonic() + 300
    with (tmp_path / "log").open("w") as log, lighthouse(log) as address, contextlib.ExitStack() as stack:

        def start(name):
            child = _group(name, tmp_path, address, log)
            stack.callback(child.kill)
            return child

        survivor, victim = start("group_0"), start("group_1")
        killed_at, rank_1 = _step_together(victim, 10, limit_s)
        os.kill(rank_1, signal.SIGKILL)
        assert victim.process.wait(300) != 0, "a group ends with its ranks"
        alone = 0
        while alone < 4:  # two steps of two ranks
            _, _, _, step, replicas, committed = survivor.next_line(limit_s)
            alone += int(step) > killed_at and (replicas, committed) == ("1", "1")
        reborn = start("group_1")
        step, _ = _step_together(reborn, 10, limit_s)
        (tmp_path / "stop").write_text(str(step + 300))
        weights = []
        for child in (survivor, reborn):
            ends = {}
            while len(ends) < 2:
                rank, _, what, step_now, *rest = child.next_line(limit_s)
                if what == "done":
                    ends[rank] = (int(step_now), rest[0])
            weights.append(ends)
    assert weights[0] == weights[1] and {end[0] for end in weights[0].values()} == {step + 300}
    assert weights[0]["0"][1] != weights[0]["1"][1], "the ranks of a group have their own batches"


@pytest.mark.slow
def test_the_lighthouse_dies(tmp_path):
    environment = {"TORCHFT_QUORUM_TIMEOUT_SEC": "15", **QUIET}
    with (tmp_path / "log").open("w") as log:
        with lighthouse(log) as address:
            command = [sys.executable, "-m", "examples.train_torchft", "--steps", "1000000"]
            child = Child(command, {**environment, "TORCHFT_LIGHTHOUSE": address}, log)
            try:
                child.next_line(time.monotonic() + 300)
            except RuntimeError:
                child.kill()
                raise
        try:
            assert child.process.wait(300) == 1
        finally:
            child.kill()
    said = (tmp_path / "log").read_text()
    assert "torchft found no quorum" in said and f"No lighthouse answers at {address}" in said, _tail(tmp_path / "log")


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["local_sgd", "diloco", "averager"])
def test_averages_of_parameters(tmp_path, method):
    with (tmp_path / "log").open("w") as log, lighthouse(log, min_replicas=2) as address:
        ends = last_words(["tests.fault.local_sgd_replica", method, "NAME"], log, address)
    assert [int(end[1]) for end in ends] == [4, 4], _tail(tmp_path / "log")
    assert ends[0][-1] == ends[1][-1]


def _tail(path: Path) -> str:
    return "\n".join(line for line in path.read_text().splitlines() if "[INFO]" not in line)[-4000:]
