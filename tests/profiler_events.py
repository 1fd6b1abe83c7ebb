"""Hand-made timelines with known answers."""

from typing import NamedTuple

from torchddp.profiler.ranks import RankRecord
from torchddp.profiler.steps import BucketLayout, Layout, Step, read_steps

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
