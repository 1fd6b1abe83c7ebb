"""Turns the events of the reducer's timeline into steps: when each bucket was filled, sent and done. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torchddp._C import Event


def overlap_ratio(hidden: float, communication: float) -> float:
    return hidden / communication if communication else 1.0


# A bucket's times, in their order.
BUCKET_TIMES = ("first_ready_ns", "last_ready_ns", "packed_ns", "launched_ns", "wait_begin_ns", "done_ns")


class BucketLayout(NamedTuple):
    params: tuple[int, ...]
    nbytes: int


Layout = tuple[BucketLayout, ...]


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one step of one rank. Times in ns of the rank's steady clock; None: it did not happen."""

    index: int
    nbytes: int
    params: tuple[int, ...]
    first_ready_ns: int | None = None
    last_ready_ns: int | None = None
    # The parameter whose gradient came last and completed the bucket.
    holder: int | None = None
    packed_ns: int | None = None
    launched_ns: int | None = None
    wait_begin_ns: int | None = None
    # When the waiting thread, which takes buckets in order, saw that the reduction had ended.
    done_ns: int | None = None
    # The earlier bucket that was packed later: buckets are launched in order, so this one queued behind it.
    behind: int | None = None

    @property
    def sent(self) -> bool:
        """Whether it was reduced; False if it was skipped because none of its parameters was used."""
        return self.launched_ns is not None and self.done_ns is not None


@dataclass(frozen=True)
class Step:
    """One synchronized forward and backward of one rank. Times in ns of the rank's steady clock."""

    index: int  # the reducer's count of synchronized forwards; the same step has the same number on all ranks
    forward_begin_ns: int
    backward_begin_ns: int  # the first gradient
    compute_end_ns: int  # the last gradient
    backward_end_ns: int  # gradients are final
    buckets: tuple[BucketTimes, ...]
    # (parameter, time) in the order in which gradients became ready.
    gradients: tuple[tuple[int, int], ...]

    @property
    def duration_ns(self) -> int:
        return self.backward_end_ns - self.forward_begin_ns

    @property
    def exposed_ns(self) -> int:
        return self.backward_end_ns - self.compute_end_ns

    @property
    def hidden_ns(self) -> int:
        launched = [bucket.launched_ns for bucket in self.buckets if bucket.launched_ns is not None]
        return max(0, self.compute_end_ns - min(launched, default=self.compute_end_ns))

    @property
    def comm_ns(self) -> int:
        """0 if nothing was sent."""
        return self.hidden_ns + self.exposed_ns if any(bucket.sent for bucket in self.buckets) else 0

    @property
    def overlap_ratio(self) -> float:
        return overlap_ratio(self.hidden_ns, self.comm_ns)

    def shifted(self, offset_ns: int) -> Step:

        def moved(times: BucketTimes | Step) -> dict[str, Any]:
            found = {name: time_ns for name, time_ns in vars(times).items() if name.endswith("_ns")}
            return {name: None if time_ns is None else time_ns + offset_ns for name, time_ns in found.items()}

        buckets = tuple(replace(bucket, **moved(bucket)) for bucket in self.buckets)
        gradients = tuple((param, time_ns + offset_ns) for param, time_ns in self.gradients)
        return replace(self, **moved(self), buckets=buckets, gradients=gradients)


@dataclass(frozen=True)
class Steps:
    """The steps of a timeline. `incomplete`: how many others lost events to the ring buffer, or never ended."""

    complete: tuple[Step, ...]
    incomplete: int


def read_steps(events: Iterable[Event], layout_of: Callable[[int], Layout]) -> Steps:
    groups = _split(sorted(events, key=lambda event: event.time_ns))
    complete = tuple(step for group in groups if (step := _read_step(group, layout_of)) is not None)
    return Steps(complete, len(groups) - len(complete))


def _split(events: Sequence[Event]) -> list[list[Event]]:
    """Split events into one list per step, from the start of a forward to the end of its backward."""
    groups: list[list[Event]] = []
    ended = True
    for event in events:
        if ended or event.kind == "forward_begin":
            groups.append([])
        groups[-1].append(event)
        ended = event.kind == "backward_end"
    return groups


def _read_step(events: Sequence[Event], layout_of: Callable[[int], Layout]) -> Step | None:
    begin, end = events[0], events[-1]
    backward = next((event for event in events if event.kind == "backward_begin"), None)
    if begin.kind != "forward_begin" or backward is None or end.kind != "backward_end":
        return None
    gradients = tuple((event.id, event.time_ns) for event in events if event.kind == "grad_ready")
    ready = dict(gradients)
    at = {(event.kind, event.id): event.time_ns for event in events}
    return Step(
        index=begin.id,
        forward_begin_ns=begin.time_ns,
        backward_begin_ns=backward.time_ns,
        compute_end_ns=max(ready.values(), default=backward.time_ns),
        backward_end_ns=end.time_ns,
        buckets=_queued([_read_bucket(index, layout, ready, at) for index, layout in enumerate(layout_of(begin.id))]),
        gradients=gradients,
    )


def _read_bucket(
    index: int, layout: BucketLayout, ready: dict[int, int], at: dict[tuple[str, int], int]
) -> BucketTimes:
    arrived = [(ready[param], param) for param in layout.params if param in ready]
    last = max(arrived, key=lambda item: item[0], default=None)
    return BucketTimes(
        index=index,
        nbytes=layout.nbytes,
        params=layout.params,
        first_ready_ns=min((time_ns for time_ns, _ in arrived), default=None),
        last_ready_ns=None if last is None else last[0],
        holder=None if last is None else last[1],
        packed_ns=at.get(("packed", index)),
        launched_ns=at.get(("launched", index)),
        wait_begin_ns=at.get(("wait_begin", index)),
        done_ns=at.get(("done", index)),
    )


def _queued(buckets: Sequence[BucketTimes]) -> tuple[BucketTimes, ...]:
    found: list[BucketTimes] = []
    slowest_ns, slowest = -math.inf, 0
    for bucket in buckets:
        packed_ns = bucket.packed_ns
        is_behind = packed_ns is not None and packed_ns < slowest_ns
        found.append(replace(bucket, behind=slowest) if is_behind else bucket)
        if packed_ns is not None and not is_behind:
            slowest_ns, slowest = packed_ns, bucket.index
    return tuple(found)


def layout_at(step: int, layouts: Sequence[tuple[int, Layout]]) -> Layout:
    """The buckets that a step used. `layouts`: each with the first step that used it, in rising order."""
    return layouts[max(0, bisect.bisect_right(layouts, step, key=lambda since: since[0]) - 1)][1]
