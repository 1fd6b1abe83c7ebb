"""The benchmark of single collectives: its formulas, its checks, its table, and implementations that are not there."""

from __future__ import annotations

import io
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.harness import run_ranks
from torchddp.bench import cli, report
from torchddp.bench.cases import MAX_ROUNDS, MIN_ROUNDS, Job
from torchddp.bench.collective import implementations, operations
from torchddp.bench.collective.companion import timed_ns
from torchddp.bench.collective.implementations import OPENINGS, LocalTrial, Ours, open_all
from torchddp.bench.collective.measure import time_operation
from torchddp.bench.collective.operations import OPERATIONS, Check
from torchddp.bench.collective.results import collective_result
from torchddp.bench.collective.rounds import next_batch, one_round, open_meeting
from torchddp.bench.collective.show import collective_table, curve
from torchddp.bench.registry import CASES, check_operations

MB = 1024**2
IMPLEMENTATIONS = [name for name, _ in OPENINGS]
REASON = "transport must be 'auto' or 'c10d', got 'shm'"

# --- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world_size", "factor"),
    [
        ("all_reduce", 1, 0),
        ("all_reduce", 2, 1),
        ("all_reduce", 8, 1.75),
        ("broadcast", 2, 1),
        ("broadcast", 8, 1),
        ("all_gather", 2, 0.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("reduce_scatter", 4, 0.75),
    ],
)
def test_busbw_is_that_of_nccl_tests(name: str, world_size: int, factor: float) -> None:
    assert operations.algbw_gb_per_s(5_000_000, 1000.0) == 5.0
    assert operations.busbw_gb_per_s(OPERATIONS[name], 5_000_000, 1000.0, world_size) == pytest.approx(5.0 * factor)


def test_sizes_go_from_64_b_to_64_mb_in_fours() -> None:
    sizes = operations.SIZES_BYTES
    assert (sizes[0], sizes[-1], len(sizes)) == (64, 64 * MB, 11)
    assert all(after == 4 * before for before, after in zip(sizes, sizes[1:], strict=False))
    assert set(operations.QUICK_SIZES_BYTES) < set(sizes)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(1020, "1020 B"), (1024, "1 KB"), (65536, "64 KB"), (MB - 4, "1 MB"), (MB, "1 MB"), (256 * MB, "256 MB")],
)
def test_sizes_are_written_in_powers_of_1024(size_bytes: int, text: str) -> None:
    assert operations.size_text(size_bytes) == text


@given(st.integers(0, 10**7), st.integers(1, 64))
def test_messages_split_into_equal_shards_of_at_least_one_element(size_bytes: int, world_size: int) -> None:
    numel = operations.whole_numel(size_bytes, world_size)
    assert numel >= world_size and numel % world_size == 0
    assert abs(numel - size_bytes / operations.ITEM_BYTES) <= world_size


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_roofline_is_the_time_of_the_copies_it_was_measured_with(world_size: int) -> None:
    # A rank's copy reads and writes one message: just what it must move in an all-reduce.
    memory_gb_per_s = operations.streamed_gb_per_s(16 * MB, [2000.0] * world_size)
    assert memory_gb_per_s == pytest.approx(world_size * 2 * 16 * MB / 2e-3 / 1e9)
    assert operations.roofline_us(16 * MB, world_size, memory_gb_per_s) == pytest.approx(2000.0)


def test_only_a_large_all_reduce_between_ranks_has_a_roofline() -> None:
    assert operations.has_roofline(OPERATIONS["all_reduce"], 16 * MB, 2)
    assert not operations.has_roofline(OPERATIONS["all_reduce"], 16 * MB - 4, 2)
    assert not operations.has_roofline(OPERATIONS["all_reduce"], 16 * MB, 1)
    assert not operations.has_roofline(OPERATIONS["broadcast"], 256 * MB, 2)


@pytest.mark.parametrize(
    ("rounds", "elapsed_s", "batch"),
    [
        (0, 0.0, 1),
        (1, 1.0, 1),  # a round takes a large part of the time: ask again after each
        (10, 0.01, 1250),  # an eighth of the time
        (100, 9.9, 12),
        (100, 10.0, 0),
        (MIN_ROUNDS - 1, 99.0, 1),
        (MAX_ROUNDS - 1, 0.1, 1),
        (MAX_ROUNDS, 0.1, 0),
    ],
)
def test_the_clock_is_looked_at_about_eight_times(rounds: int, elapsed_s: float, batch: int) -> None:
    assert next_batch(rounds, elapsed_s, seconds=10.0) == batch


# --- rounds ----------------------------------------------------------------------------------------------------------


class Recorded:
    """A trial that writes down its name once per call."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self._calls = calls

    def time_ns(self, lead_in: int) -> int:
        self._calls.append(self.name * lead_in)
        return 1000 * len(self.name)

    def check(self) -> None:
        raise AssertionError("not between rounds")


def test_each_is_timed_in_its_turn() -> None:
    calls: list[str] = []
    trials = [Recorded(name, calls) for name in ("a", "bb", "ccc")]
    assert one_round(trials, [2, 0, 1], lead_in=2) == [1.0, 2.0, 3.0]
    assert calls == ["cccccc", "aa", "bbbb"]


@pytest.mark.parametrize(("lead_in", "calls"), [(0, "wmr"), (1, "wrwmr"), (4, "wrwrwrwrwmr")])
def test_before_every_call_the_input_is_written_and_before_the_timed_one_ranks_meet(lead_in: int, calls: str) -> None:
    made: list[str] = []
    write, run, meet = (partial(made.append, name) for name in "wrm")
    assert timed_ns(write, run, meet, lead_in) >= 0
    assert "".join(made) == calls


def test_a_rank_rests_before_its_calls_as_processes_beside_it_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(implementations.time, "sleep", made.append)
    tensor = torch.empty(8)
    check = Check("x", "all_reduce", 0, 1, 8)
    LocalTrial("x", tensor, tensor, partial(made.append, "run"), check, lambda: None).time_ns(1)
    assert made == [implementations.REST_S, "run", "run"]


def test_every_call_finds_its_input_as_it_was() -> None:
    found: list[torch.Tensor] = []
    tensor = torch.empty(1000)

    def run() -> None:
        found.append(tensor.clone())
        tensor.mul_(2)  # of one rank alone it would be the sum of two

    trial = LocalTrial("x", tensor, tensor, run, Check("x", "all_reduce", 0, 1, 1000), lambda: None)
    trial.time_ns(lead_in=2)
    with pytest.raises(operations.WrongResultError):
        trial.check()
    assert len(found) == 4 and all(torch.equal(one, operations.stamp(0, 1000)) for one in found)


def test_nobody_leaves_a_meeting_before_the_last_has_come() -> None:
    def work(rank: int) -> list[tuple[float, float]]:
        meet = open_meeting()
        times = []
        for late in (0, 2, 1):
            time.sleep(0.05 * (rank == late))
            came_s = time.monotonic()
            meet()
            times.append((came_s, time.monotonic()))
        return times

    for meeting in zip(*run_ranks(work, 3), strict=True):
        assert max(came_s for came_s, _ in meeting) <= min(left_s for _, left_s in meeting)


# --- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_expected_outputs_are_those_of_the_stamped_inputs(world_size: int) -> None:
    numel = 600 * world_size
    inputs = [operations.stamp(rank, numel) for rank in range(world_size)]
    total = torch.stack(inputs).sum(0)
    for rank in range(world_size):
        mine = slice(rank * 600, (rank + 1) * 600)
        assert torch.equal(operations.expected("all_reduce", rank, world_size, numel), total)
        assert torch.equal(operations.expected("reduce_scatter", rank, world_size, numel), total[mine])
        assert torch.equal(operations.expected("broadcast", rank, world_size, numel), inputs[-1])
        gathered = operations.expected("all_gather", rank, world_size, numel)
        assert torch.equal(gathered[mine], operations.stamp(rank, 600))


def test_stamps_differ_between_ranks_and_sum_exactly() -> None:
    stamps = [operations.stamp(rank, 300) for rank in range(64)]
    assert all(not torch.equal(a, b) for i, a in enumerate(stamps) for b in stamps[:i])
    assert torch.equal(torch.stack(stamps).sum(0).double(), torch.stack(stamps).double().sum(0))


def test_a_wrong_result_is_named() -> None:
    check = Check("idle", "all_reduce", 1, 2, 1000)
    right = operations.expected("all_reduce", 1, 2, 1000)
    check.compare(right)
    right[7] = -1
    with pytest.raises(
        operations.WrongResultError,
        match=r"all_reduce of 'idle' on rank 1, 1000 elements: 1 of 1000 are wrong, the first at 7, where it is -1.0",
    ):
        check.compare(right)


# --- implementations -------------------------------------------------------------------------------------------------


def brief_job(*names: str) -> Job:
    return Job("collective", (), (), 2, seconds=0.02, operations=names, sizes_bytes=(1024, 4096))


def without_progress(done: float, total: float) -> None:
    assert 0 <= done <= total


@pytest.mark.rest_is_thorough("all_reduce")
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_implementation_that_opens_is_timed(name: str) -> None:
    def work(rank: int) -> dict[str, Any]:
        return time_operation(brief_job(name), name, without_progress)

    raw = run_ranks(work, 2)[0]
    here = [one for one in IMPLEMENTATIONS if one not in raw["unavailable"]]
    assert {"gloo", "c10d", "torchddp_shm"} <= set(here)
    for size, size_bytes in zip(raw["sizes"], (1024, 4096), strict=True):
        assert (size["bytes"], size["names"]) == (size_bytes, here)
        assert size["time_us"].shape[0] == len(here) and size["time_us"].shape[1] >= MIN_ROUNDS
        assert (size["time_us"] > 0).all() and (size["slowest_us"] >= size["time_us"]).all()


def test_what_does_not_open_on_one_rank_is_left_out_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> tuple[list[str], dict[str, str]]:
        real = implementations.open_transport

        def open_transport(choice: str, group: Any) -> Any:
            if choice == "shm" and rank == 1:
                raise RuntimeError("no room on this host\nand a long trace")
            return real("c10d", group)

        monkeypatch.setattr(implementations, "open_transport", open_transport)
        opened, reasons = open_all(OPENINGS, lambda: None)
        return [one.name for one in opened], reasons

    assert run_ranks(work, 2) == [(["gloo", "c10d", "torchddp_shm"], {"shm": "no room on this host"})] * 2


def test_what_cannot_allocate_one_size_is_left_out_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> dict[str, Any]:
        real = Ours.allocate

        def allocate(self: Ours, numel: int) -> torch.Tensor:
            if numel == 1024:
                raise RuntimeError("too large")
            return real(self, numel)

        monkeypatch.setattr(Ours, "allocate", allocate)
        return time_operation(brief_job("all_reduce"), "all_reduce", without_progress)

    small, large = run_ranks(work, 2)[0]["sizes"]
    assert small["unavailable"] == {} and "c10d" in small["names"]
    assert large["unavailable"]["c10d"] == "too large" and large["names"] == ["gloo", "torchddp_shm"]


# --- results and the table -------------------------------------------------------------------------------------------


def raw_size(size_bytes: int, times_us: dict[str, float], memory_gb_per_s: float | None = None) -> dict[str, Any]:
    return {
        "bytes": size_bytes,
        "unavailable": {},
        "names": list(times_us),
        "time_us": np.array([[time_us] * 20 for time_us in times_us.values()]),
        "slowest_us": np.array([[2 * time_us] * 20 for time_us in times_us.values()]),
        "memory_gb_per_s": memory_gb_per_s,
    }


def raw_result(name: str, sizes: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    plain = {"operation": name, "peers": False, "processors": 8, "unavailable": {}, "remarks": {}, "sizes": sizes}
    return plain | changed


def fake_result(name: str = "all_reduce", world_size: int = 2) -> dict[str, Any]:
    sizes = [
        raw_size(1024, {"gloo": 100.0, "c10d": 90.0, "shm": 5.0, "torchddp_shm": 10.0}),
        raw_size(
            16 * MB,
            {"gloo": 8000.0, "c10d": 8000.0, "shm": 4000.0, "torchddp_shm": 5000.0},
            2 * 2 * 16 * MB / 2e-3 / 1e9,
        ),
    ]
    return collective_result(raw_result(name, sizes), world_size)


def without_shm() -> dict[str, Any]:
    sizes = [raw_size(1024, {"gloo": 100.0, "c10d": 90.0})]
    return collective_result(raw_result("broadcast", sizes, unavailable={"shm": REASON}), world_size=2)


def rows_of(size: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in size["implementations"]}


def printed(renderable: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80).print(renderable)
    return stream.getvalue()


def test_results_hold_times_bandwidths_and_ratios_to_gloo() -> None:
    small, large = fake_result()["sizes"]
    assert rows_of(small)["gloo"]["ratio_to_gloo"] is None
    assert rows_of(small)["shm"]["ratio_to_gloo"]["median"] == pytest.approx(0.05)
    assert rows_of(small)["shm"]["slowest_rank_us"]["median"] == pytest.approx(10.0)
    assert rows_of(large)["shm"]["time_us"]["p99"] == pytest.approx(4000.0)
    assert rows_of(large)["shm"]["algbw_gb_per_s"] == pytest.approx(16 * MB / 4e-3 / 1e9)
    gathered = rows_of(fake_result("all_gather")["sizes"][1])["shm"]
    assert gathered["busbw_gb_per_s"] == pytest.approx(gathered["algbw_gb_per_s"] / 2)


def test_only_shared_memory_is_held_against_the_roofline() -> None:
    small, large = fake_result()["sizes"]
    assert (small["roofline_us"], large["roofline_us"]) == (None, pytest.approx(2000.0))
    assert {name: row["over_roofline"] for name, row in rows_of(large).items()} == {
        "gloo": None,
        "c10d": None,
        "shm": pytest.approx(2.0),
        "torchddp_shm": None,
    }


def test_the_table_fits_80_columns_and_says_what_is_missing() -> None:
    text = printed(collective_table(fake_result())) + printed(collective_table(without_shm()))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for words in ("1 KB", "16 MB", *IMPLEMENTATIONS, "0.50 [0.50..0.50]", "2.00", "20 rounds", "not available"):
        assert words in text
    assert f"shm not available: {REASON}" in " ".join(text.split())
    assert "roof" in printed(collective_table(fake_result())) and "roof" not in printed(collective_table(without_shm()))
    assert "memory bandwidth, all ranks copying at once: 33.6 GB/s at 16 MB" in text


def test_the_report_of_collectives_alone_has_no_words_on_ddp_options() -> None:
    machine = {"cpu": "x", "cores": 2, "load_average_1min": 0.0, "torch": "2", "torchddp": "0", "git_commit": "abc"}
    document = {
        "date": "2030-01-02T03:04:05+00:00",
        "machine": {**machine, "git_dirty": False},
        "command": "python -m benchmarks",
        "settings": {"quick": False},
        "results": [fake_result()],
    }
    text = printed(report.render(document))
    assert "nccl-tests" in text and "batched_grad_copy" not in text and "Summary" not in text


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_plot_has_a_curve_for_each_implementation(world_size: int, tmp_path: Path) -> None:
    result = fake_result(world_size=world_size)
    assert curve(result, "shm")[:2] == ([1024, 16 * MB], [pytest.approx(5.0), pytest.approx(4000.0)])
    assert curve(without_shm(), "shm") == ([], [], [])
    report.save_plot([result, without_shm()], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "nope"], "There is no collective 'nope'; choose from all_reduce, broadcast, all_gather"),
        (["--case", "memory", "--op", "broadcast"], "--op is for the case collective; add --case collective."),
        (["--case", "collective", "--model", "gpt"], "--model: the case collective has no models."),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_an_operation_alone_selects_its_case() -> None:
    assert check_operations([], [], ["broadcast", "broadcast"]) == (("collective",), ("broadcast",))
    assert check_operations([], [], []) == ([], ("all_reduce",))
    assert "collective" in CASES
