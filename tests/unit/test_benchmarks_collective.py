"""The benchmark of single collectives: formulas, checks, and unavailable implementations."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import each, gathered, on_ranks
from tests.unit.benchmark_results import by_name
from tests.unit.helpers import printed
from torchddp.bench.cases import MAX_ROUNDS, MIN_ROUNDS, Job
from torchddp.bench.collective import implementations, operations
from torchddp.bench.collective.implementations import OPENINGS, LocalTrial, Ours
from torchddp.bench.collective.measure import time_operation
from torchddp.bench.collective.operations import OPERATIONS, Check
from torchddp.bench.collective.results import collective_result
from torchddp.bench.collective.rounds import next_batch, open_meeting
from torchddp.bench.collective.show import collective_table

MB = 1024**2
IMPLEMENTATIONS = [name for name, _ in OPENINGS]


def test_bandwidths_and_how_often_the_clock_is_read() -> None:
    assert operations.algbw_gb_per_s(5_000_000, 1000.0) == 5.0
    factors = {"all_reduce": [1, 1.75], "broadcast": [1, 1], "all_gather": [0.5, 0.875], "reduce_scatter": [0.5, 0.875]}
    for name, expected in factors.items():
        found = [operations.busbw_gb_per_s(OPERATIONS[name], 5_000_000, 1000.0, ranks) for ranks in (2, 8)]
        assert found == pytest.approx([5.0 * factor for factor in expected])
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
def test_what_one_rank_lacks_is_skipped_on_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory for all sizes, and the group's transport for the larger size."""
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
