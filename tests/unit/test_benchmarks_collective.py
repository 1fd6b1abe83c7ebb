"""The benchmark of single collectives: checks of results, rounds, missing libraries, MPI's ranks, and the report."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import collective
from benchmarks.cases.collective import LIBRARIES, Library
from tests.harness import each, gathered, on_ranks
from tests.unit.benchmark_results import by_name
from tests.unit.helpers import assert_refused, printed, wait_until
from torchddp.bench import cli
from torchddp.bench.cases import MIN_ROUNDS, Job
from torchddp.harness.launch import THIS_HOST

MB = 1024**2


@on_ranks(1)
def test_inputs_are_restored_before_every_call_and_wrong_results_are_named() -> None:
    found: list[torch.Tensor] = []

    def bind(source: torch.Tensor, target: torch.Tensor) -> dict[str, collective.Run]:
        def run() -> None:
            found.append(source.clone())
            target.mul_(2)  # the sum of two equal ranks

        return {"all_reduce": run}

    trial = collective.Trial("x", Library(torch.empty, bind), "all_reduce", 1000, barrier=lambda: None)
    trial.step()
    words = r"all_reduce of 'x' on rank 0: \d+ of 1000 elements are wrong, the first at index \d+ with value"
    with pytest.raises(collective.WrongResultError, match=words):
        trial.check()
    assert len(found) == collective.LEAD_IN_SMALL + 2
    assert all(torch.equal(one, collective.stamp(0, 1000)) for one in found)


@on_ranks(3)
def test_no_rank_leaves_a_barrier_before_the_last_arrives(rank: int) -> None:
    barrier = collective.Barrier()
    for late in (0, 2, 1):
        time.sleep(0.05 * (rank == late))
        came_s = time.monotonic()
        barrier()
        left_s = time.monotonic()
        assert max(gathered(came_s)) <= left_s


def timed(operation: str) -> dict[str, Any]:
    job = Job("collective", (), (), 2, seconds=0.02, options={"sizes": (1024, 4096)})
    return collective.measure(job, operation, lambda done, total: None)


@on_ranks(2)
def test_every_library_that_opens_is_timed(rank: int) -> None:
    for operation in each(collective.BUS_FACTORS):
        raw = timed(operation)
        if rank != 0:
            continue
        assert raw["names"] == [name for name in LIBRARIES if name not in raw["unavailable"]]
        assert {"gloo", "c10d", "torchddp_shm"} <= set(raw["names"])
        assert [size["bytes"] for size in raw["sizes"]] == [1024, 4096]
        for size in raw["sizes"]:
            assert size["time_us"].shape[0] == len(raw["names"]) and size["time_us"].shape[1] >= MIN_ROUNDS
            assert (size["time_us"] > 0).all() and (size["slowest_us"] >= size["time_us"]).all()


@on_ranks(2)
def test_a_library_that_fails_on_one_rank_is_skipped_on_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Library:
        if rank == 1:
            raise RuntimeError("no room on this host\nand a long trace")
        return LIBRARIES["gloo"]()

    monkeypatch.setattr(collective, "LIBRARIES", {"gloo": LIBRARIES["gloo"], "shm": failing})
    raw = timed("all_reduce")
    assert raw["names"] == ["gloo"] and raw["unavailable"] == {"shm": "no room on this host"}


# As MPICH's launcher: starts a program per rank with the variables to reach it, and ends with them.
FAKE_LAUNCHER = """
import os, subprocess, sys

port, n, size, *program = sys.argv[1:]
assert (port, n) == ("-pmi-port", "-n")
variables = [{**os.environ, "PMI_ID": str(rank), "PMI_PORT": "here:1"} for rank in range(int(size))]
for process in [subprocess.Popen(program, env=each) for each in variables]:
    process.wait()
"""


def test_mpis_launcher_knows_the_ranks_and_ends_with_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with collective.open_place(2) as place:
        assert place is THIS_HOST  # without the launcher and mpi4py
    launcher = tmp_path / "mpiexec.hydra"
    launcher.write_text(f"#!{sys.executable}\n{FAKE_LAUNCHER}")
    launcher.chmod(0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(real(*args, **options)) or started[0]
    )
    with collective.open_place(2) as place:
        assert place.environment == {"PMI_PORT": "here:1"}
        assert started[0].poll() is None
    assert wait_until(lambda: started[0].poll() is not None)


def fake_result(operation: str = "all_reduce", names: tuple[str, ...] = tuple(LIBRARIES), **changed: Any) -> Any:
    sizes = []
    for nbytes, times_us in ((1024, (100.0, 10.0, 90.0, 5.0, 20.0)), (16 * MB, (8e3, 9e3, 8e3, 4e3, 5e3))):
        time_us = np.array([[one] * 20 for one in times_us[: len(names)]])
        sizes.append({"bytes": nbytes, "time_us": time_us, "slowest_us": 2 * time_us})
    plain = {"operation": operation, "processors": 8, "unavailable": {}, "names": list(names), "sizes": sizes}
    return collective.collective_result(plain | changed, world_size=4)


def test_torchddp_is_compared_with_the_fastest_peer_of_each_size() -> None:
    result = fake_result()
    assert [size["best_peer"] for size in result["sizes"]] == ["mpich", "gloo"]
    small, large = (by_name(size["implementations"]) for size in result["sizes"])
    assert small["shm"]["best_peer_ratio"]["median"] == pytest.approx(0.5)
    assert small["torchddp_shm"]["best_peer_ratio"]["median"] == pytest.approx(2.0)
    assert large["shm"]["best_peer_ratio"]["median"] == pytest.approx(0.5)
    assert small["mpich"]["best_peer_ratio"] is None and large["mpich"]["best_peer_ratio"] is None
    assert small["shm"]["slowest_rank_us"]["median"] == pytest.approx(10.0)
    bandwidth = 16 * MB / 4e-3 / 1e9
    for operation, factor in (("all_reduce", 1.5), ("broadcast", 1.0), ("all_gather", 0.75), ("reduce_scatter", 0.75)):
        row = by_name(fake_result(operation)["sizes"][1]["implementations"])["shm"]
        assert row["busbw_gb_per_s"] == pytest.approx(factor * bandwidth), operation


def test_the_report_says_what_is_missing_and_that_ranks_share_processors() -> None:
    result = fake_result(names=("gloo",), unavailable={"shm": "no room"}, processors=2)
    text = printed(collective.collective_table(result))
    for words in ("1 KB", "16 MB", "shm not available: no room", "4 ranks share 2 processors", "1 (best peer)"):
        assert words in text
    axes = collective.draw([fake_result(), result]).axes
    assert [len(axis.lines) for axis in axes] == [5, 5, 1, 1]


def test_a_wrong_argument_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--set", "op=nope"], "--set op: there is no 'nope'; choose from all_reduce, broadcast"),
        (["--set", "sizes=0"], "--set sizes: must be a whole number from 1"),
        (["--model", "gpt"], "--model: collective takes no model."),
    ):
        assert_refused(partial(cli.main, cases=[collective.CASE]), ["--case", "collective", *arguments], words, capsys)


@pytest.mark.thorough
def test_a_run_of_collectives_writes_its_numbers_and_a_plot(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["--case", "collective", "--quick", "--seconds", "0.1", "--json", str(path), "--out", str(tmp_path)]
    assert cli.main(arguments, [collective.CASE]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert [size["bytes"] for size in result["sizes"]] == [1024, 65536, 4 * 1024**2]
    for size in result["sizes"]:
        assert {"gloo", "c10d"} <= {entry["name"] for entry in size["implementations"]}
        assert all(entry["time_us"]["median"] > 0 for entry in size["implementations"])
    assert len(list(tmp_path.glob("*-collective-*.png"))) == 1
