"""The benchmarks over two emulated hosts and a slow link: what they measure, and that they leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.slow_link.job import SLICE_STEPS
from benchmarks.two_hosts.network import make_hosts
from torchddp.harness.machine import ROOT
from torchddp.harness.variants import TORCH_DDP

COMMAND = [sys.executable, "-m", "benchmarks.two_hosts", "--model", "small", "--caps", "25"]


pytestmark = pytest.mark.usefixtures("two_namespaces")


def namespaces_of(pid: int) -> list[str]:
    return [host.namespace for host in make_hosts(pid) if Path("/run/netns", host.namespace).exists()]


def ranks_of(pid: int) -> list[int]:
    """Processes that have become Python inside the namespaces of a command."""
    found = []
    for name in namespaces_of(pid):
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        found += [int(rank) for rank in listed if b"two_hosts.worker" in command_line(int(rank))]
    return found


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.thorough
def test_a_run_times_the_steps_and_counts_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["--seconds", "0.1", "--transport", "c10d", "--json", str(path)]
    with subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL) as command:
        assert command.wait(90) == 0
        assert not namespaces_of(command.pid)
    (result,) = json.loads(path.read_text())["results"]
    assert (result["world_size"], result["transport"]) == (4, "c10d")
    local, *wrapped = result["variants"]
    assert [row["role"] for row in wrapped] == ["torch", "torch", "ours"]
    assert all(sent < 10_000 for sent in local["sent_bytes"])
    for row in wrapped:
        # No reduction can do with less than each byte once; a ring over four ranks has one and a half.
        assert len(row["sent_bytes"]) == 2
        assert all(0.95 < sent / result["gradient_bytes"] < 3 for sent in row["sent_bytes"]), row


@pytest.fixture
def long_run() -> Iterator[subprocess.Popen[str]]:
    """A command whose four ranks have started."""
    arguments = ["--seconds", "600", "--ours", TORCH_DDP]
    # What a shell starts in the background ignores SIGINT, and so would this command, had it inherited that.
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    try:
        assert wait_until(lambda: len(ranks_of(command.pid)) == 4, 60)
        yield command
    finally:
        command.kill()
        command.communicate(timeout=10)


@pytest.mark.rest_is_thorough("9")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_an_ended_command(long_run: subprocess.Popen[str], how: signal.Signals) -> None:
    ranks = ranks_of(long_run.pid)
    long_run.send_signal(how)
    assert long_run.wait(20) == (130 if how is signal.SIGINT else -how)
    assert wait_until(lambda: not any(command_line(rank) for rank in ranks), 10)
    assert wait_until(lambda: not namespaces_of(long_run.pid), 10)


def test_a_rank_that_dies_ends_the_run(long_run: subprocess.Popen[str]) -> None:
    ranks = ranks_of(long_run.pid)
    os.kill(ranks[0], signal.SIGKILL)
    _, said = long_run.communicate(timeout=30)
    assert long_run.returncode == 1
    assert "its process died without a message" in said
    assert not any(map(command_line, ranks))
    assert not namespaces_of(long_run.pid)


# A rate at which the shortest run takes seconds.
SLOW_LINK = [sys.executable, "-m", "benchmarks.slow_link", "--rate", "1gbit", "--ranks-per-host", "1"]


@pytest.mark.thorough
def test_a_short_run_brings_everyone_to_the_loss(tmp_path: Path) -> None:
    path, plot = tmp_path / "run.json", tmp_path / "run.png"
    methods = ["--methods", "exact,int8,powersgd,diloco,torch-powersgd", "--steps", str(2 * SLICE_STEPS)]
    done = subprocess.run(
        [*SLOW_LINK, *methods, "--output", str(path), "--plot", str(plot)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text())["results"]
    rows = {row["name"]: row for row in result["methods"]}
    assert {name: row["error"] for name, row in rows.items() if "error" in row} == {}
    assert rows["torch-ddp"]["arrival"]["steps"] == 2 * SLICE_STEPS
    # The same gradients but for rounding.
    assert rows["exact"]["arrival"]["steps"] == pytest.approx(2 * SLICE_STEPS, rel=0.05)
    gradient_bytes = 4 * result["parameters"]
    sent = {name: max(row["sent_bytes_per_step"]) / gradient_bytes for name, row in rows.items()}
    assert 0.95 < sent["torch-ddp"] < 1.2 and 0.95 < sent["exact"] < 1.2
    assert sent["int8"] < 0.3 and sent["powersgd"] < 0.3 and sent["diloco"] < 0.3
    assert {row["title"] for row in result["comparisons"]} >= {"int8 / torch DDP", "PowerSGD / torch's PowerSGD"}
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_network_behind() -> None:
    with subprocess.Popen([*SLOW_LINK, "--methods", "exact"], cwd=ROOT, stdout=subprocess.DEVNULL) as command:
        assert wait_until(lambda: len(namespaces_of(command.pid)) == len(make_hosts(command.pid)), 60)
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 130
    assert wait_until(lambda: not namespaces_of(command.pid), 10)
