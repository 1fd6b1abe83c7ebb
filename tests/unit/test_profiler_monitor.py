"""The values that a logger gets, from known statistics."""

from __future__ import annotations

from unittest import mock

from torchddp.profiler.monitor import Monitor, values_of
from torchddp.traffic import Traffic

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


def test_values_are_ms() -> None:
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


def test_unknown_bytes_are_left_out_and_nothing_communicated_is_all_hidden() -> None:
    assert "ddp/wire_bytes" not in values_of(STATS, {**SENT, "hook": Traffic(1200, None)})
    still = {**STATS, "backward_comm_time": 0, "backward_compute_comm_overlap_time": 0}
    assert values_of(still, SENT)["ddp/overlap_ratio"] == 1.0


def test_a_copy_that_counts_from_zero_is_reported_too() -> None:
    told: list[int] = []
    watching = Monitor(lambda step, values: told.append(step), 2, 500)
    for finished in range(8):
        reducer = mock.Mock(**{"stats.return_value": STATS | {"finished": finished}})
        watching(mock.Mock(**{"reducer": reducer, "traffic.return_value": SENT}), ())
    assert told and told[0] <= 4
