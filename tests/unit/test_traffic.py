"""Bytes of a step: text and totals."""

from __future__ import annotations

from torchddp.profiler.ranks import RankRecord, traffic_dicts
from torchddp.profiler.report import sent_lines
from torchddp.traffic import Traffic, text_of, total_wire_bytes


def test_text_and_totals() -> None:
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
        assert text_of(traffic).startswith(words) and total_wire_bytes(traffic) == total


def record(rank: int, sent: int | None) -> RankRecord:
    return RankRecord(rank, "host", "clock", (), (), traffic={"c10d": Traffic(1_000_000, sent)})


def test_the_rank_that_sent_most_is_named_where_ranks_differ() -> None:
    said = ": 1 MB as gradients, 0.5 MB on the wire (c10d)"
    assert sent_lines([record(0, 500_000), record(1, 500_000)]) == [f"sent per step{said}"]
    assert sent_lines([record(0, 0), record(1, 500_000)]) == [f"sent per step, by rank 1{said}"]
    assert traffic_dicts([record(0, None)]) == [{"c10d": {"payload_bytes": 1_000_000, "wire_bytes": None}}]
