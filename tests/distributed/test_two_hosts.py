"""The benchmarks over emulated hosts and slow links: their results, and that they leave nothing behind."""

import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from benchmarks.hosts import make_hosts
from tests.unit.helpers import wait_until
from torchddp.harness.machine import ROOT

LONG = ["links", "--set", "place=1gbit", "--world-size", "4", "--model", "small", "--caps", "25", "--seconds", "600"]
# A rate at which the shortest run takes seconds.
SLOW_LINK = ["training", "--set", "place=1gbit"]
STEPS = 20

pytestmark = pytest.mark.usefixtures("two_namespaces")


def namespaces_of(pid):
    return [host.namespace for host in make_hosts(pid) if Path("/run/netns", host.namespace).exists()]


def ranks_of(pid):
    """The Python processes inside the namespaces of a command."""
    found = []
    for name in namespaces_of(pid):
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        found += [int(rank) for rank in listed if b"multiprocessing" in command_line(int(rank))]
    return found


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def started(case, *arguments):
    # Background jobs of a shell ignore SIGINT, and this command would inherit that.
    command = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "--case", case, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield command
    finally:
        command.kill()
        command.communicate(timeout=300)


@pytest.mark.parametrize(
    ("benchmark", "ranks", "how"),
    [
        (LONG, 4, signal.SIGKILL),
        pytest.param(LONG, 4, signal.SIGINT, marks=pytest.mark.thorough),
        pytest.param(LONG, 4, signal.SIGTERM, marks=pytest.mark.thorough),
        pytest.param([*SLOW_LINK, "--set", "methods=exact"], 2, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_nothing_outlives_a_stopped_command(benchmark, ranks, how):
    with started(*benchmark) as command:
        assert wait_until(lambda: len(ranks_of(command.pid)) == ranks)
        running = ranks_of(command.pid)
        command.send_signal(how)
        assert command.wait(300) == (130 if how is signal.SIGINT else -how)
        assert wait_until(lambda: not any(map(command_line, running)))
        assert wait_until(lambda: not namespaces_of(command.pid))
