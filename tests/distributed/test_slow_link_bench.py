"""`python -m benchmarks.slow_link`, on real namespaces: one short run, and that it leaves nothing behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.slow_link.job import SLICE_STEPS
from benchmarks.two_hosts.network import make_hosts
from torchddp.harness.machine import ROOT

# A rate at which the shortest run takes seconds.
COMMAND = [sys.executable, "-m", "benchmarks.slow_link", "--rate", "1gbit", "--ranks-per-host", "1"]


pytestmark = pytest.mark.usefixtures("two_namespaces")


@pytest.mark.thorough
def test_a_short_run_brings_everyone_to_the_loss(tmp_path: Path) -> None:
    path, plot = tmp_path / "run.json", tmp_path / "run.png"
    methods = ["--methods", "exact,int8,powersgd,diloco,torch-powersgd", "--steps", str(2 * SLICE_STEPS)]
    done = subprocess.run(
        [*COMMAND, *methods, "--output", str(path), "--plot", str(plot)],
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
    with subprocess.Popen([*COMMAND, "--methods", "exact"], cwd=ROOT, stdout=subprocess.DEVNULL) as command:
        namespaces = [Path("/run/netns", host.namespace) for host in make_hosts(command.pid)]
        deadline_s = time.monotonic() + 60
        while not all(path.exists() for path in namespaces) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert all(path.exists() for path in namespaces)
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 130
    deadline_s = time.monotonic() + 10
    while any(path.exists() for path in namespaces) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(path.exists() for path in namespaces)
