"""Profiles: steps parsed from hand-made events, and those of all ranks merged on one clock with stragglers named."""

import html
import json
import re
from dataclasses import asdict, replace
from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import ROOT
from torchddp.harness.tables import bytes_text
from torchddp.profiler import report
from torchddp.profiler.export import FIRST_THREAD, chrome_trace, draw
from torchddp.profiler.numbers import TERMS, profile_numbers, spans, step_numbers
from torchddp.profiler.page import page
from torchddp.profiler.ranks import (
    Clock,
    MergedProfile,
    RankRecord,
    align,
    clock_identity,
    merge,
    merge_step,
)
from torchddp.profiler.session import Monitor, values_of
from torchddp.profiler.steps import BucketLayout, Layout, Step, layout_at, read_steps
from torchddp.traffic import Traffic, total_wire_bytes

MS = 1_000_000
# Two buckets of two parameters each, filled from the last parameter to the first.
LAYOUT: Layout = (BucketLayout((3, 2), 800), BucketLayout((1, 0), 400))
NAMES = ("first.weight", "first.bias", "last.weight", "last.bias")


class FakeEvent(NamedTuple):
    """An event of the reducer's timeline."""

    kind: str
    id: int
    time_ns: int


def step_events(index: int = 1, begin_ms: float = 0.0, late_ms: float = 0.0) -> list[FakeEvent]:
    """One step of 20 ms: backward from 4 to 14 ms, bucket 0 in flight from 8 to 16, bucket 1 from 14 to 20.

    `late_ms`: the delay of parameter 1 and all later events, including the starts of waits and ends of reductions.
    """
    table = [
        ("forward_begin", index, 0.0),
        ("backward_begin", index, 4.0),
        ("grad_ready", 3, 5.0),
        ("grad_ready", 2, 7.0),
        ("packed", 0, 8.0),
        ("launched", 0, 8.0),
        ("grad_ready", 1, 10.0 + late_ms),
        ("grad_ready", 0, 14.0 + late_ms),
        ("packed", 1, 14.0 + late_ms),
        ("launched", 1, 14.0 + late_ms),
        ("wait_begin", 0, 15.0 + late_ms),
        ("done", 0, 16.0 + late_ms),
        ("wait_begin", 1, 16.0 + late_ms),
        ("done", 1, 20.0 + late_ms),
        ("backward_end", index, 20.0 + late_ms),
    ]
    return [FakeEvent(kind, id, round((begin_ms + at) * MS)) for kind, id, at in table]


def one_step(index: int = 1, begin_ms: float = 0.0, late_ms: float = 0.0) -> Step:
    """The parsed step of `step_events`."""
    return read_steps(step_events(index, begin_ms, late_ms), lambda _: LAYOUT).complete[0]


def record(rank: int, steps: list[Step], clock: str = "one") -> RankRecord:
    """The record of a rank with these steps."""
    return RankRecord(rank, f"host-{clock}", clock, NAMES, tuple(steps))


def waiting_step(late_ms: float, index: int = 1) -> Step:
    """The step of a rank whose peer is `late_ms` late with bucket 1: it waits that much longer."""
    events = [
        event._replace(time_ns=event.time_ns + round(late_ms * MS))
        if (event.kind, event.id) in {("done", 1), ("backward_end", index)}
        else event
        for event in step_events(index)
    ]
    return read_steps(events, lambda _: LAYOUT).complete[0]


def test_a_step_is_parsed_from_its_events() -> None:
    step = one_step(index=7)
    assert (step.index, step.duration_ns, step.exposed_ns) == (7, 20 * MS, 6 * MS)
    assert (step.backward_begin_ns, step.compute_end_ns, step.backward_end_ns) == (4 * MS, 14 * MS, 20 * MS)
    assert [param for param, _ in step.gradients] == [3, 2, 1, 0]
    first, second = step.buckets
    assert (first.first_ready_ns, first.last_ready_ns, first.packed_ns) == (5 * MS, 7 * MS, 8 * MS)
    assert (first.launched_ns, first.wait_begin_ns, first.done_ns) == (8 * MS, 15 * MS, 16 * MS)
    assert (first.holder, second.holder) == (2, 0)
    assert (first.nbytes, first.params) == (800, (3, 2))
    assert first.sent and first.behind is None and second.behind is None
    # From the first launch until gradients are final, and its share before the last gradient.
    assert step.comm_ns == step.hidden_ns + step.exposed_ns == 12 * MS  # 8 to 20
    assert step.overlap_ratio == pytest.approx(6 / 12)  # 8 to 14


def test_a_skipped_bucket_was_not_sent() -> None:
    events = [e for e in step_events() if not (e.id == 1 and e.kind in ("launched", "wait_begin", "done"))]
    (step,) = read_steps(events, lambda _: LAYOUT).complete
    skipped = step.buckets[1]
    assert not skipped.sent and skipped.launched_ns is None and skipped.packed_ns == 14 * MS
    assert step.comm_ns == 12 * MS
    events = [e for e in events if e.kind not in ("launched", "wait_begin", "done")]
    (step,) = read_steps(events, lambda _: LAYOUT).complete
    assert (step.comm_ns, step.overlap_ratio) == (0, 1.0)  # nothing was sent, so all is hidden


def test_parameters_without_gradients_are_not_waited_for() -> None:
    events = [e for e in step_events() if not (e.kind == "grad_ready" and e.id in (0, 2, 3))]
    (step,) = read_steps(events, lambda _: LAYOUT).complete
    empty, half = step.buckets
    assert (empty.first_ready_ns, empty.last_ready_ns, empty.holder) == (None, None, None)
    assert (half.first_ready_ns, half.last_ready_ns, half.holder) == (10 * MS, 10 * MS, 1)
    assert step.compute_end_ns == 10 * MS


def test_a_bucket_is_queued_behind_the_one_that_delays_its_launch() -> None:
    swap = {("packed", 0): 14, ("launched", 0): 14, ("packed", 1): 9, ("launched", 1): 14}
    events = [e._replace(time_ns=swap.get((e.kind, e.id), e.time_ns // MS) * MS) for e in step_events()]
    (step,) = read_steps(events, lambda _: LAYOUT).complete
    assert [bucket.behind for bucket in step.buckets] == [None, 0]


def test_truncated_and_unfinished_steps_are_counted_as_incomplete() -> None:
    events = [event for index in range(4) for event in step_events(index, begin_ms=30.0 * index)]
    read = read_steps(events[5:], lambda _: LAYOUT)
    assert [step.index for step in read.complete] == [1, 2, 3]
    assert read.incomplete == 1
    assert {step.duration_ns for step in read.complete} == {20 * MS}
    broken = step_events(1)[:6]  # an error in backward
    forward_only = [FakeEvent("forward_begin", 2, 30 * MS)]
    out_of_order = step_events(3, begin_ms=60.0)  # as with several threads
    out_of_order[2], out_of_order[3] = out_of_order[3], out_of_order[2]
    read = read_steps([*broken, *forward_only, *out_of_order], lambda _: LAYOUT)
    assert read.complete == (one_step(3, begin_ms=60.0),) and read.incomplete == 2


def test_each_step_has_the_bucket_layout_that_it_used() -> None:
    other = (BucketLayout((3, 2, 1, 0), 1200),)
    assert [layout_at(step, [(1, other), (2, LAYOUT)]) for step in range(4)] == [other, other, LAYOUT, LAYOUT]


STATS = {
    "finished": 1,
    "num_buckets_reduced": 3,
    "bytes_reduced": 1200,
    "forward_compute_time": 4_000_000,
    "backward_compute_time": 10_000_000,
    "backward_comm_time": 12_000_000,
    "backward_compute_comm_overlap_time": 6_000_000,
    "exposed_comm_time": 6_000_000,
}
SENT = {"shm": Traffic(1200, 1000), "outer": Traffic(600, 300)}


def test_a_logger_gets_times_overlap_and_bytes() -> None:
    assert values_of(STATS, SENT) == {
        "ddp/step_ms": 20.0,
        "ddp/forward_ms": 4.0,
        "ddp/backward_ms": 10.0,
        "ddp/comm_ms": 12.0,
        "ddp/exposed_ms": 6.0,
        "ddp/overlap_ratio": 0.5,
        "ddp/buckets": 3,
        "ddp/bytes": 1200,
        "ddp/wire_bytes": 1300,
    }
    assert "ddp/wire_bytes" not in values_of(STATS, {**SENT, "hook": Traffic(1200, None)})
    still = {**STATS, "backward_comm_time": 0, "backward_compute_comm_overlap_time": 0}
    assert values_of(still, SENT)["ddp/overlap_ratio"] == 1.0


def test_the_monitor_reports_although_its_step_count_starts_above_the_models() -> None:
    told: list[int] = []
    model = mock.Mock(**{"traffic.return_value": SENT})
    model.reducer.stats.return_value = {"finished": 500}
    watching = Monitor(model, lambda step, values: told.append(step), 2)
    for finished in range(8):
        model.reducer.stats.return_value = STATS | {"finished": finished}
        watching(model, ())
    assert told and told[0] <= 4


def test_traffic_is_described_in_words_with_the_rank_that_sent_most() -> None:
    for traffic, words, total in (
        ({}, "nothing", 0),
        ({"shm": Traffic(25_200_000, 12_600_000)}, "25.2 MB as gradients, 12.6 MB on the wire (shm)", 12_600_000),
        (
            # Bytes sent to other hosts are included in shared memory's.
            {"shm": Traffic(4_000_000, 3_000_000), "outer": Traffic(2_000_000, 1_000_000)},
            "4 MB as gradients, 3 MB on the wire (shm), 1 MB on the wire (to other hosts)",
            4_000_000,
        ),
        ({"hook": Traffic(1_000, None)}, "1 kB as gradients, ? on the wire (hook)", None),
        ({"c10d": Traffic(0, 5), "hook": Traffic(10, None)}, "10 B as gradients", None),
    ):
        assert report.sent_text(traffic).startswith(words) and total_wire_bytes(traffic) == total, traffic
    said = ": 1 MB as gradients, 500 kB on the wire (c10d)"
    for first, words in ((500_000, "sent per step"), (0, "sent per step, by rank 1")):
        records = [replace(record_of(rank, sent), steps=(one_step(),)) for rank, sent in enumerate((first, 500_000))]
        assert next(report.notes(profile_numbers(merge(records, [Clock()] * 2)))) == words + said
    assert [bytes_text(count) for count in (0, 999, 999_600, 25_200_000_000, None)] == [
        "0 B",
        "999 B",
        "1 MB",
        "25.2 GB",
        "?",
    ]
    unknown = replace(record_of(0, None), steps=(one_step(),))
    traffic = {"c10d": {"payload_bytes": 1_000_000, "wire_bytes": None}}
    assert profile_numbers(merge([unknown], [Clock()]))["traffic"] == [traffic]


def record_of(rank: int, sent: int | None) -> RankRecord:
    return RankRecord(rank, "host", "clock", NAMES, (), traffic={"c10d": Traffic(1_000_000, sent)})


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
    expected = {"rank": 1, "step": 1, "wait_ns": 48 * MS, "lost_ns": 50 * MS}
    assert asdict(step.straggler) == {**expected, "where": "backward", "parameter": 1}
    assert step.waits_ns == (0, 48 * MS)
    first, second = step.buckets
    assert (second.last_rank, second.late_ns, second.holder) == (1, 50 * MS, 0)
    assert (first.last_rank, first.late_ns, first.wait_ns) == (0, 0, 0)
    assert (second.first_ready_ns, second.last_ready_ns, second.launched_ns) == (10 * MS, 64 * MS, 64 * MS)
    assert (step.slowest, step.duration_ns) == (0, 70 * MS)


def test_only_steps_that_all_ranks_recorded_are_merged() -> None:
    profile = late_profile()
    assert [step.index for step in profile.steps] == [1, 2]
    assert profile.mean_waits_ns() == [0, 24 * MS]
    assert profile.steps[1].straggler is None
    assert profile.median_step().index == 2  # the shorter of two
    with pytest.raises(ValueError, match="no complete step .* rank 0: 1, rank 1: 0"):
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
    step = read_steps(events, lambda _: LAYOUT).complete[0]
    profile = merge([record(0, [step]), record(1, [step])], [Clock()] * 2)
    assert profile.steps[0].buckets[1].last_rank is None and profile.steps[0].buckets[1].launched_ns is None
    assert "(skipped: unused)" in report.bucket_rows(profile_numbers(profile))[1]


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


def lasts(*ranks: int, wait_ms: float = 10.0) -> MergedProfile:
    """Steps of 100 ms, with the last rank of each."""
    profile, wait_ns = late_profile(), round(wait_ms * MS)
    steps = []
    for index, rank in enumerate(ranks):
        straggler = replace(profile.steps[0].straggler, rank=rank, wait_ns=wait_ns)
        waits_ns = (wait_ns * (rank == 0), wait_ns * (rank == 1))
        steps.append(replace(profile.steps[0], index=index, waits_ns=waits_ns, straggler=straggler))
    return replace(profile, steps=tuple(steps))


def test_a_straggler_is_named_only_if_significant():
    for ranks, wait_ms, is_straggler, words in (
        ([1] * 15 + [0] * 5, 10.0, True, "rank 1 was last in 15 of 20 steps with waits (p = 0.041)"),
        ([1] * 14 + [0] * 6, 10.0, False, "none; rank 1 was last in 14 of 20 steps with waits (p = 0.12), which"),
        ([0] * 5, 10.0, False, "too few steps to tell; rank 0 was last in 5 of 5 steps with waits (p = 0.062)"),
        ([0] * 20, 0.5, False, "none that matters; rank 0 was last in 20 of 20 steps with waits (p < 0.001), but"),
    ):
        profile = lasts(*ranks, wait_ms=wait_ms)
        last = profile.last_rank()
        assert last.is_straggler is is_straggler, words
        data = profile_numbers(profile)
        assert any(words in line for line in report.notes(data))
        assert ("is a straggler" if is_straggler else "most of it a wait for a later rank") in data["verdict"], words
        assert (data["straggler"] is not None) is is_straggler and data["last_rank"]["steps"] == last.steps, words


def test_only_the_slowest_ranks_own_waits_count_in_the_verdict() -> None:
    late, waiting = record(1, [one_step(begin_ms=-1, late_ms=11)]), record(0, [waiting_step(10)])
    data = profile_numbers(merge([waiting, late], [Clock()] * 2))
    assert data["slowest_rank"] == 1 and data["buckets"][1]["wait_us"] == 8000
    assert data["wait_for_ranks_us"] == 0 and "`torchddp tune` tries other buckets" in data["verdict"]


def test_the_json_report_has_names_and_numbers() -> None:
    profile = six_late_steps()
    data = json.loads(json.dumps(profile_numbers(profile), allow_nan=False))
    assert data["straggler"]["rank"] == 1 and data["straggler"]["parameter"] == "first.bias"
    assert data["straggler"]["wait_us"] == 48000 and data["slowest_rank"] == 0
    last = {"rank": 1, "steps": 6, "of": 6, "p_value": 0.03125, "wait_us": 48000}
    assert data["last_rank"] == {**last, "share": pytest.approx(48 / 70)}
    assert data["buckets"][1]["held_back_by"] == "first.weight" and data["buckets"][1]["last_rank"] == 1
    assert data["buckets"][0]["first_ready_us"] == 5000 and data["ranks"][0]["exposed_us"] == 56000


def test_a_step_has_the_numbers_of_its_slowest_rank_although_another_has_more_exposed() -> None:
    slow = [e if e.kind == "forward_begin" else e._replace(time_ns=e.time_ns + 50 * MS) for e in step_events()]
    slowest = read_steps(slow, lambda _: LAYOUT).complete[0]
    profile = merge([record(3, [waiting_step(40)]), record(5, [slowest])], [Clock()] * 2)
    found = profile_numbers(profile)
    assert (found["slowest_rank"], found["step_us"], found["exposed_us"]) == (5, 70_000, 6_000)
    assert found["ranks"][0]["exposed_us"] == 46_000
    assert [found["buckets"][i]["last_rank"] for i in (0, 1)] == [5, 5]
    assert report.headline(found)[0].startswith("step 70.0 ms (rank 5, slowest) = forward 54.0 +")


@given(st.lists(st.integers(0, 2_000_000), min_size=3, max_size=3))
def test_the_parts_that_a_headline_shows_add_up(extra_us: list[int]) -> None:
    events, moved = [], 0
    starts = {("backward_begin", 1): 0, ("grad_ready", 0): 1, ("backward_end", 1): 2}
    for event in step_events():
        place = starts.get((event.kind, event.id))
        moved += 0 if place is None else 1000 * extra_us[place]
        events.append(event._replace(time_ns=event.time_ns + moved))
    profile = merge([record(0, [read_steps(events, lambda _: LAYOUT).complete[0]])], [Clock()])
    for line in report.headline(profile_numbers(profile))[:2]:
        total, *parts = (float(text) for text in re.findall(r"(?<= )\d+(?:\.\d+)?", line))
        assert total == pytest.approx(sum(parts)), line


def plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", markup.partition("<script")[0]))


@pytest.mark.parametrize("late_ms", [0.0, 3.3, 51.7])
def test_text_json_page_picture_and_chrome_trace_show_the_same_numbers(late_ms: float) -> None:
    each = [(waiting_step(late_ms, index), one_step(index, 0, late_ms)) for index in range(1, 8)]
    profile = merge([record(rank, [pair[rank] for pair in each]) for rank in (0, 1)], [Clock()] * 2)
    found = json.loads(json.dumps(profile_numbers(profile)))
    text = " ".join(report.as_text(report.report(found)).split())
    shown = page("a trace", found["verdict"], [("", profile)], ["origin"])
    on_page, data = (
        " ".join(plain(shown).split()),
        json.loads(shown.partition('id="data">')[2].partition("</script>")[0]),
    )
    (run,) = data
    for line in (*report.headline(found), *report.notes(found)):
        assert line in text and line in on_page
    assert run["steps"][run["median"]]["headline"] == report.headline(found)
    assert f"step {found['step_us'] / 1e3:.1f} ms" in text
    assert f"exposed {found['exposed_us'] / 1e3:.1f}" in text
    assert found["verdict"] in on_page
    for row in report.bucket_rows(found):
        assert " ".join(row) in text and " ".join(row) in on_page
    trace = json.loads(json.dumps(chrome_trace(profile, [profile.median_step()])))
    assert {name: found[name] for name in trace["otherData"]} == trace["otherData"]
    # Perfetto would merge these threads into their process's main thread.
    assert all(event["tid"] not in (0, event["pid"]) for event in trace["traceEvents"])
    step = profile.median_step()
    figure = draw(found, "title")
    for place, rank in enumerate(found["ranks"]):
        lengths: dict[str, float] = {}
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and event["pid"] == rank["rank"] and event["tid"] == FIRST_THREAD:
                lengths[event["name"]] = lengths.get(event["name"], 0) + event["dur"]
        for what in ("forward", "backward", "exposed"):
            assert lengths[what] == pytest.approx(rank[f"{what}_us"]), what
        drawn = [
            (run["kinds"][what], begin, end) for _, what, begin, end in run["steps"][run["median"]]["spans"][place]
        ]
        assert drawn == [(what, pytest.approx(a, abs=0.1), pytest.approx(b, abs=0.1)) for _, what, a, b in spans(rank)]
        bars = [bar.get_width() for bar in figure.axes[place].patches]
        assert bars == pytest.approx([(b - a) / 1e3 for _, _, a, b in spans(rank)])
    assert step_numbers(profile, step)["exposed_us"] == found["exposed_us"]


def test_every_word_of_the_page_is_explained_there_and_in_the_docs() -> None:
    shown = plain(page("a trace", "", [("", late_profile())], []))
    docs = (ROOT / "docs" / "profiling.md").read_text()
    for word, meaning in TERMS.items():
        assert meaning in shown and f"| {word} | {meaning} |" in docs, word
    for what in dict.fromkeys(
        what for rank in profile_numbers(late_profile())["ranks"] for _, what, _, _ in spans(rank)
    ):
        assert what in TERMS
