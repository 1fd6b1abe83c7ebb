"""Steps parsed from hand-made events, the values that loggers get, and traffic in words."""

from unittest import mock

import pytest

from tests.profiler_events import LAYOUT, MS, FakeEvent, one_step, step_events
from torchddp.profiler.ranks import RankRecord, traffic_dicts
from torchddp.profiler.report import sent_lines
from torchddp.profiler.session import Monitor, values_of
from torchddp.profiler.steps import BucketLayout, Layouts, read_steps
from torchddp.traffic import Traffic, text_of, total_wire_bytes


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
    # The union of the buckets' times, and its share before the last gradient.
    assert step.comm_ns == 12 * MS  # 8 to 16 and 14 to 20
    assert step.overlap_ratio == pytest.approx(6 / 12)  # 8 to 14


def test_a_skipped_bucket_was_not_sent() -> None:
    events = [e for e in step_events() if not (e.id == 1 and e.kind in ("launched", "wait_begin", "done"))]
    (step,) = read_steps(events, lambda _: LAYOUT).complete
    skipped = step.buckets[1]
    assert not skipped.sent and skipped.launched_ns is None and skipped.packed_ns == 14 * MS
    assert step.comm_ns == 8 * MS
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
    layouts = Layouts()
    layouts.note(0, other)
    layouts.note(1, other)
    layouts.note(2, LAYOUT)
    assert [layouts.of(step) for step in range(4)] == [other, other, LAYOUT, LAYOUT]


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
    watching = Monitor(lambda step, values: told.append(step), 2, 500)
    for finished in range(8):
        reducer = mock.Mock(**{"stats.return_value": STATS | {"finished": finished}})
        watching(mock.Mock(**{"reducer": reducer, "traffic.return_value": SENT}), ())
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
        ({"hook": Traffic(1_000, None)}, "0.001 MB as gradients, ? on the wire (hook)", None),
        ({"c10d": Traffic(0, 5), "hook": Traffic(10, None)}, "1e-05 MB as gradients", None),
    ):
        assert text_of(traffic).startswith(words) and total_wire_bytes(traffic) == total, traffic
    said = ": 1 MB as gradients, 0.5 MB on the wire (c10d)"
    assert sent_lines([record(0, 500_000), record(1, 500_000)]) == [f"sent per step{said}"]
    assert sent_lines([record(0, 0), record(1, 500_000)]) == [f"sent per step, by rank 1{said}"]
    assert traffic_dicts([record(0, None)]) == [{"c10d": {"payload_bytes": 1_000_000, "wire_bytes": None}}]


def record(rank: int, sent: int | None) -> RankRecord:
    return RankRecord(rank, "host", "clock", (), (), traffic={"c10d": Traffic(1_000_000, sent)})
