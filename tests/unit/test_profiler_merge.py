"""Profiles of all ranks merged on one clock: clock offsets, stragglers, and the report."""

import json
from dataclasses import asdict, replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.profiler_events import LAYOUT, MS, NAMES, one_step, record, step_events, waiting_step
from torchddp.harness.tables import adding_up
from torchddp.profiler import report
from torchddp.profiler.ranks import Clock, MergedProfile, align, chance_to_be_last, clock_identity, merge, merge_step
from torchddp.profiler.session import merged_trace
from torchddp.profiler.steps import read_steps

LATE_MS = 50.0


def late_profile(clock_ahead_ms: float = 0.0) -> MergedProfile:
    """Rank 1 is late with parameter 1 and rank 0 waits for it, in all steps except one."""
    ahead_ns = round(clock_ahead_ms * MS)
    ranks = [
        record(0, [waiting_step(LATE_MS), one_step(2, 200), one_step(3, 400)]),
        record(1, [s.shifted(ahead_ns) for s in (one_step(1, 0, LATE_MS), one_step(2, 200), one_step(4, 400))], "two"),
    ]
    return merge(ranks, [Clock(), Clock(-ahead_ns, 5)])


def six_late_steps() -> MergedProfile:
    profile = late_profile()
    return MergedProfile(profile.records, profile.clocks, profile.steps[:1] * 6)


def test_clock_offsets_come_from_the_most_precise_round() -> None:
    assert align(["a", "a"], [(), ()]) == [Clock(), Clock()]
    assert clock_identity() == clock_identity() != ""
    # Rank 1's clock is 1000 ahead. Round 1 takes 100 and round 2 takes 20, so round 2 is more precise.
    readings = [[(0, 100), (200, 220)], [(1000, 1100), (1200, 1220)]]
    assert align(["a", "b"], readings)[1] == Clock(-1000, 20)
    with pytest.raises(ValueError, match="without readings"):
        align(["a", "b"], [(), ()])


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(*[st.integers(0, 10**6)] * 4), min_size=1, max_size=8))
def test_the_true_offset_is_within_the_uncertainty(offset: int, rounds: list[tuple[int, int, int, int]]) -> None:
    readings: list[list[tuple[int, int]]] = [[], []]
    now = 0
    for enter_a, enter_b, leave_a, leave_b in rounds:
        all_in = now + max(enter_a, enter_b)  # no rank leaves before all have entered
        readings[0].append((now + enter_a, all_in + leave_a))
        readings[1].append((now + enter_b + offset, all_in + leave_b + offset))
        now = all_in + max(leave_a, leave_b)
    clock = align(["a", "b"], readings)[1]
    assert abs(clock.offset_ns + offset) <= clock.uncertainty_ns + 1


@pytest.mark.parametrize("clock_ahead_ms", [0.0, 12345.0, -7.0])
def test_the_straggler_is_named_with_its_wait_and_its_parameter(clock_ahead_ms: float) -> None:
    step = late_profile(clock_ahead_ms).steps[0]
    # Rank 0 began to wait for bucket 1 at 16 ms, rank 1 launched it at 64.
    expected = {"rank": 1, "wait_ns": 48 * MS, "total_wait_ns": 48 * MS, "lost_ns": 50 * MS}
    assert asdict(step.straggler) == {**expected, "where": "backward", "parameter": 1}
    assert step.waits_ns == (0, 48 * MS)
    first, second = step.buckets
    assert (second.last_rank, second.late_ns, second.holder) == (1, 50 * MS, 0)
    assert (first.last_rank, first.late_ns, first.wait_ns) == (0, 0, 0)
    assert (second.first_ready_ns, second.last_ready_ns, second.launched_ns) == (10 * MS, 64 * MS, 64 * MS)
    assert (step.duration_ns, step.exposed_ns) == (70 * MS, 56 * MS)


def test_only_steps_that_all_ranks_recorded_are_merged() -> None:
    profile = late_profile()
    assert [step.index for step in profile.steps] == [1, 2]
    assert profile.mean_waits_ns() == [0, 24 * MS]
    assert profile.steps[1].straggler is None
    assert profile.median_step().index == 2  # the shorter of two
    with pytest.raises(ValueError, match="no step .* rank 0: 1, rank 1: 0"):
        merge([record(0, [one_step()]), record(1, [])], [Clock(), Clock()])


def test_a_rank_that_starts_late_is_distinguished_from_a_slow_one() -> None:
    late = merge_step([waiting_step(LATE_MS), one_step(1, begin_ms=LATE_MS)]).straggler
    assert (late.rank, late.where, late.parameter, late.lost_ns) == (1, "start", None, 50 * MS)
    slow_forward = [e if e.kind == "forward_begin" else e._replace(time_ns=e.time_ns + 50 * MS) for e in step_events()]
    slow = read_steps(slow_forward, lambda _: LAYOUT).complete[0]
    slower = merge_step([waiting_step(LATE_MS), slow]).straggler
    assert (slower.rank, slower.where, slower.lost_ns) == (1, "forward", 50 * MS)


def test_a_bucket_that_all_ranks_skipped_has_no_last_rank() -> None:
    events = [e for e in step_events() if not (e.id == 1 and e.kind in ("launched", "wait_begin", "done"))]
    step = merge_step([read_steps(events, lambda _: LAYOUT).complete[0]] * 2)
    assert step.buckets[1].last_rank is None and step.buckets[1].launched_ns is None
    assert "(skipped: unused)" in report.bucket_rows(step, NAMES)[1]


@given(st.lists(st.integers(0, 200), min_size=2, max_size=5))
def test_all_waits_are_attributed_to_the_last_rank(late_ms: list[int]) -> None:
    last = max(late_ms)
    events = []
    for late in late_ms:
        slow = step_events(1, 0, late)
        ends = {("done", 1), ("backward_end", 1)}
        events.append([e._replace(time_ns=(20 + last) * MS) if (e.kind, e.id) in ends else e for e in slow])
    step = merge_step([read_steps(e, lambda _: LAYOUT).complete[0] for e in events])
    expected = sum(max(0, 14 + last - (16 + late)) for late in late_ms) * MS
    assert sum(step.waits_ns) == expected
    assert not expected or late_ms[step.straggler.rank] == last


def test_the_report_fits_80_columns() -> None:
    profile = six_late_steps()
    text = report.as_text(report.merged_report(profile))
    assert all(len(line) <= 80 for line in text.splitlines())
    words = " ".join(text.split())
    assert "straggler: rank 1 was last in 6 of 6 steps (p = 0.031); each other rank waited 48.0 ms per step" in words
    assert "in step 1 it lost 50.0 ms before the gradient of first.bias" in words
    said = report.verdict(profile, profile.median_step())
    assert said == "Rank 1 is a straggler: each other rank waits 48.0 ms per step for it, 69% of the step."
    assert "clocks of different hosts aligned to within 0 us" in words
    # Rank 0 is exposed for longer and rank 1 computes for longer; the report doesn't mix them.
    assert "step 70.0 ms on rank 0, the slowest = forward 4.0 + backward 10.0 + exposed communication 56.0" in words
    # Many small delays are not blamed on one parameter.
    step = replace(profile.steps[0], straggler=replace(profile.steps[0].straggler, lost_ns=MS))
    slow = replace(profile, steps=(step,) * 6)
    assert "it was slower throughout: it lost no more than 1.00 ms" in report.straggler_lines(slow)[1]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=5))
def test_printed_parts_add_up_to_the_printed_sum(values: list[float]) -> None:
    total, parts = adding_up(values)
    assert sum(map(Decimal, parts)) == Decimal(total)
    tolerance = float(Decimal(1).scaleb(Decimal(total).as_tuple().exponent))
    assert [float(part) for part in parts] == pytest.approx(values, abs=1.01 * tolerance)


def lasts(*ranks: int, wait_ms: float = 10.0) -> MergedProfile:
    """Steps of 100 ms, with the last rank of each."""
    profile, wait_ns = late_profile(), round(wait_ms * MS)
    steps = []
    for index, rank in enumerate(ranks):
        straggler = replace(profile.steps[0].straggler, rank=rank, wait_ns=wait_ns, total_wait_ns=wait_ns)
        waits_ns = (wait_ns * (rank == 0), wait_ns * (rank == 1))
        steps.append(replace(profile.steps[0], index=index, waits_ns=waits_ns, straggler=straggler))
    return replace(profile, steps=tuple(steps))


def test_a_straggler_is_named_only_if_significant():
    for ranks, wait_ms, is_straggler, words in (
        ([1] * 15 + [0] * 5, 10.0, True, "straggler: rank 1 was last in 15 of 20 steps (p = 0.041)"),
        ([1] * 14 + [0] * 6, 10.0, False, "none; rank 1 was last in 14 of 20 steps (p = 0.12), which may be chance"),
        ([0] * 5, 10.0, False, "straggler: too few steps to tell; rank 0 was last in 5 of 5 steps (p = 0.062)"),
        ([0] * 20, 0.5, False, "none that matters; rank 0 was last in 20 of 20 steps (p < 0.001), but each other"),
    ):
        profile = lasts(*ranks, wait_ms=wait_ms)
        last = profile.last_rank()
        assert last.is_straggler is is_straggler, words
        assert words in report.straggler_lines(profile)[0]
        assert ("is a straggler" in report.verdict(profile, profile.median_step())) is is_straggler, words
        data = report.merged_dict(profile, profile.median_step())
        assert (data["straggler"] is not None) is is_straggler and data["last_rank"]["steps"] == last.steps, words


@given(st.integers(1, 30), st.integers(2, 9))
def test_the_probability_is_binomial(of: int, ranks: int) -> None:
    chances = [chance_to_be_last(steps, of, ranks) for steps in range(of + 1)]
    assert chances[0] == 1 and chances == sorted(chances, reverse=True)
    assert chances[-1] == pytest.approx(ranks * ranks**-of)


def test_the_report_of_one_rank_and_of_lost_events() -> None:
    text = report.as_text(report.rank_report(record(0, [one_step()])))
    assert "last.weight" in text and "overlap ratio 0.50" in text and "straggler" not in text
    with pytest.raises(ValueError, match="no complete step"):
        report.rank_report(record(0, []))
    (line,) = report.lost_lines([record(0, []), replace(record(1, []), dropped=17, incomplete=2)])
    assert line.startswith("rank 1: 17 events") and "2 steps" in line


def test_the_json_report_has_names_and_numbers() -> None:
    profile = six_late_steps()
    data = json.loads(json.dumps(report.merged_dict(profile, profile.steps[0]), allow_nan=False))
    assert data["straggler"]["rank"] == 1 and data["straggler"]["parameter"] == "first.bias"
    assert data["straggler"]["wait_us"] == 48000 and data["slowest_rank"] == 0
    last = {"rank": 1, "steps": 6, "of": 6, "p_value": 0.03125, "wait_us": 48000}
    assert data["last_rank"] == {**last, "share": pytest.approx(48 / 70)}
    assert data["buckets"][1]["held_back_by"] == "first.weight" and data["buckets"][1]["last_rank"] == 1
    assert data["buckets"][0]["first_ready_us"] == 5000 and data["ranks"][0]["exposed_us"] == 56000


def test_the_chrome_trace_has_processes_threads_and_durations() -> None:
    trace = json.loads(json.dumps(merged_trace(late_profile(), only_step=1)))
    events = trace["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(rank, i): n for rank in (0, 1) for i, n in enumerate(("autograd", "bucket 0", "bucket 1"))}
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"rank 0 (host-one)", "rank 1 (host-two)"}
    (flight,) = [e for e in events if e["name"] == "in flight" and (e["pid"], e["tid"]) == (1, 2)]
    assert (flight["ph"], flight["ts"], flight["dur"]) == ("X", 64000.0, 6000.0)
    assert flight["args"]["held back by"] == "first.weight" and flight["args"]["bytes"] == 400
    instants = [e["name"] for e in events if e["ph"] == "i" and e["pid"] == 0]
    assert instants == ["last.bias", "last.weight", "first.bias", "first.weight"]
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")
    assert trace["otherData"]["clock_uncertainty_us"] == [0, 0.005]
