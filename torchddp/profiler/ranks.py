"""Merges the ranks' steps on one clock: which rank was last at each bucket, and which ranks waited for it.

Note [Clocks of ranks]

Ranks of one host read the same CLOCK_MONOTONIC, so there is nothing to measure. Between hosts, Cristian's argument
applies to collectives: no rank leaves an all-reduce before every rank has entered it. So the time at which one rank
leaves, minus the time at which another enters, bounds the offset of their clocks from one side; swapping the ranks
bounds it from the other. Many rounds narrow the bounds.

Note [Stragglers]

As docs/profiling.md says: p < 0.05, where p is the tail of the binomial distribution with probability 1 / W, times W
because the rank is chosen for having been last most often (Bonferroni), and each other rank waits for at least 1% of a
step on average.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

from torchddp.profiler.steps import BucketTimes, Step
from torchddp.traffic import Traffic
from torchddp.transport.agreement import ranks_by

ROUNDS = 32
# See Note [Stragglers].
SIGNIFICANCE, LEAST_SHARE = 0.05, 0.01

# When a rank entered and left each round, in ns of its own clock.
Readings = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Clock:
    """Add `offset_ns` to a time of this rank to get rank 0's; the error is at most `uncertainty_ns`."""

    offset_ns: int = 0
    uncertainty_ns: int = 0


def clock_identity() -> str:
    """Equal for processes that read the same CLOCK_MONOTONIC: same boot, same time namespace."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    host = boot.read_text().strip() if os.access(boot, os.R_OK) else socket.gethostname()
    return f"{host} {namespace.readlink() if namespace.is_symlink() else 'without time namespaces'}"


def align(identities: Sequence[str], readings: Sequence[Readings]) -> list[Clock]:
    """The clock of each rank relative to rank 0's. Readings may be empty if all identities are equal."""
    reference = identities[0]
    members = ranks_by(identities)
    clocks = {
        identity: Clock() if identity == reference else _bounded(members[reference], ranks, readings)
        for identity, ranks in members.items()
    }
    return [clocks[identity] for identity in identities]


def _bounded(here: Sequence[int], there: Sequence[int], readings: Sequence[Readings]) -> Clock:
    """The offset that all pairs of readings allow: time here minus time there."""
    pairs = [pair for a, b in product(here, there) for pair in zip(readings[a], readings[b], strict=True)]
    if not pairs:
        raise ValueError("the clocks of different hosts cannot be aligned without readings")
    low = max(entered_a - left_b for (entered_a, _), (_, left_b) in pairs)
    high = min(left_a - entered_b for (_, left_a), (entered_b, _) in pairs)
    # If the clocks drift apart during the rounds, the bounds may cross; their distance is still the error.
    return Clock(round((low + high) / 2), round(abs(high - low) / 2))


def take_readings(group: dist.ProcessGroup | None, device: torch.device | str) -> Readings:
    """Run small all-reduces, and return when this rank entered and left each. Collective."""
    token = torch.ones(1, device=device)
    readings = []
    for _ in range(ROUNDS):
        entered_ns = time.monotonic_ns()
        dist.all_reduce(token, op=dist.ReduceOp.MAX, group=group)
        token.item()  # on a device, all_reduce() only queues it
        readings.append((entered_ns, time.monotonic_ns()))
    return readings


# --- merging (pure) ---


@dataclass(frozen=True)
class RankRecord:
    rank: int
    host: str
    clock_identity: str
    names: tuple[str, ...]
    steps: tuple[Step, ...]
    dropped: int = 0
    incomplete: int = 0
    traffic: dict[str, Traffic] = field(default_factory=dict)  # of the last step


@dataclass(frozen=True)
class MergedBucket(BucketTimes):
    """A bucket over all ranks. Times in ns of rank 0's clock: the earliest of all ranks for `first_ready_ns`, else the
    latest. `holder` and `behind` are those of the rank that launched it last."""

    last_rank: int | None = None  # the last rank to launch it; None if no rank did
    late_ns: int = 0  # how long after the first rank's launch
    wait_ns: int = 0  # the total time that ranks waited here for the last one


@dataclass(frozen=True)
class Straggler:
    """The rank for whose gradients the others waited longest in one step."""

    rank: int
    step: int
    wait_ns: int  # of each of the others, on average
    # It fell behind at the "start", in "forward" (up to its first gradient), or in "backward", before `parameter`'s.
    where: str
    parameter: int | None
    lost_ns: int  # there, compared with the fastest rank


@dataclass(frozen=True)
class LastRank:
    """The rank that was last most often, and whether that makes it a straggler: Note [Stragglers]."""

    rank: int
    steps: int  # in which it was last
    of: int  # in which any rank was last
    p_value: float
    wait_ns: float  # of each other rank per step, on average
    share: float  # of that in a step
    example: Straggler  # in a typical one of its steps

    @property
    def is_straggler(self) -> bool:
        return self.p_value < SIGNIFICANCE and self.share >= LEAST_SHARE


def chance_to_be_last(steps: int, of: int, ranks: int) -> float:
    """An upper bound for the probability that one of `ranks` equal ranks is last in at least `steps` of `of` steps."""
    each = 1 / ranks
    tail = sum(math.comb(of, count) * each**count * (1 - each) ** (of - count) for count in range(steps, of + 1))
    return min(1.0, ranks * tail)


@dataclass(frozen=True)
class MergedStep:
    index: int
    steps: tuple[Step, ...]  # by rank
    buckets: tuple[MergedBucket, ...]
    waits_ns: tuple[int, ...]  # by rank: the total time that the others waited for it
    straggler: Straggler | None  # None: no rank waited for another

    @property
    def slowest(self) -> int:
        return max(range(len(self.steps)), key=lambda place: self.steps[place].duration_ns)

    @property
    def duration_ns(self) -> int:
        return self.steps[self.slowest].duration_ns

    def wait_for_ranks_ns(self, place: int) -> int:
        """How long that rank waited for later ranks."""
        pairs = zip(self.steps[place].buckets, self.buckets, strict=False)
        return sum(_wait_ns(own, all_.launched_ns) for own, all_ in pairs if all_.launched_ns is not None)


@dataclass(frozen=True)
class MergedProfile:
    records: tuple[RankRecord, ...]  # by rank, each on its own clock
    clocks: tuple[Clock, ...]
    steps: tuple[MergedStep, ...]  # those that every rank has

    @property
    def names(self) -> tuple[str, ...]:
        return self.records[0].names

    def median_step(self) -> MergedStep:
        """The step of median duration (of an even number, the shorter of the two)."""
        ordered = sorted(self.steps, key=lambda step: (step.duration_ns, step.index))
        return ordered[(len(ordered) - 1) // 2]

    def last_rank(self) -> LastRank | None:
        """None: no rank waited for another in any step."""
        found = [step.straggler for step in self.steps if step.straggler is not None]
        if not found:
            return None
        counts = Counter(straggler.rank for straggler in found)
        means_ns, ranks = self.mean_waits_ns(), len(self.records)
        rank = max(counts, key=lambda each: (counts[each], means_ns[each]))
        wait_ns = means_ns[rank] / (ranks - 1)
        mine = sorted((s for s in found if s.rank == rank), key=lambda s: (s.wait_ns, s.step))
        shown = self.median_step().straggler
        return LastRank(
            rank=rank,
            steps=counts[rank],
            of=len(found),
            p_value=chance_to_be_last(counts[rank], len(found), ranks),
            wait_ns=wait_ns,
            share=wait_ns / fmean(step.duration_ns for step in self.steps),
            example=shown if shown in mine else mine[len(mine) // 2],
        )

    def mean_waits_ns(self) -> list[float]:
        return [fmean(step.waits_ns[rank] for step in self.steps) for rank in range(len(self.records))]


def merge(records: Sequence[RankRecord], clocks: Sequence[Clock]) -> MergedProfile:
    """Merge the steps that all ranks have, matched by number. Raises ValueError if there are none."""
    by_rank = [
        {step.index: step.shifted(clock.offset_ns) for step in record.steps}
        for record, clock in zip(records, clocks, strict=True)
    ]
    common = sorted(set.intersection(*(set(steps) for steps in by_rank)))
    if not common:
        counts = ", ".join(f"rank {record.rank}: {len(record.steps)}" for record in records)
        raise ValueError(f"no complete step was recorded on all ranks (complete steps: {counts})")
    steps = tuple(merge_step([steps[index] for steps in by_rank]) for index in common)
    return MergedProfile(tuple(records), tuple(clocks), steps)


def merge_step(steps: Sequence[Step]) -> MergedStep:
    count = min(len(step.buckets) for step in steps)
    buckets = tuple(_merge_bucket([step.buckets[index] for step in steps]) for index in range(count))
    waits = [0] * len(steps)
    for bucket in buckets:
        if bucket.last_rank is not None:
            waits[bucket.last_rank] += bucket.wait_ns
    return MergedStep(steps[0].index, tuple(steps), buckets, tuple(waits), _straggler(steps, waits))


def _merge_bucket(ranks: Sequence[BucketTimes]) -> MergedBucket:
    launches = [(bucket.launched_ns, rank) for rank, bucket in enumerate(ranks) if bucket.launched_ns is not None]
    # If several ranks launched last at the same instant, name the first of them.
    last_ns, last_rank = max(launches, key=lambda item: item[0], default=(None, None))
    last = ranks[last_rank] if last_rank is not None else None

    def seen(name: str) -> list[int]:
        times = [getattr(bucket, name) for bucket in ranks]
        return [time_ns for time_ns in times if time_ns is not None]

    return MergedBucket(
        index=ranks[0].index,
        nbytes=ranks[0].nbytes,
        params=ranks[0].params,
        first_ready_ns=min(seen("first_ready_ns"), default=None),
        last_ready_ns=max(seen("last_ready_ns"), default=None),
        packed_ns=max(seen("packed_ns"), default=None),
        launched_ns=last_ns,
        done_ns=max(seen("done_ns"), default=None),
        last_rank=last_rank,
        late_ns=0 if last_ns is None else last_ns - min(launches)[0],
        wait_ns=0 if last_ns is None else sum(_wait_ns(b, last_ns) for b in ranks if b is not last),
        holder=last.holder if last else None,
        behind=last.behind if last else None,
    )


def _wait_ns(bucket: BucketTimes, last_launch_ns: int) -> int:
    """The part of a rank's wait before the last rank launched, in which the reduction could not begin."""
    if bucket.wait_begin_ns is None or bucket.done_ns is None:
        return 0
    return max(0, min(bucket.done_ns, last_launch_ns) - bucket.wait_begin_ns)


def _straggler(steps: Sequence[Step], waits: Sequence[int]) -> Straggler | None:
    total = max(waits)
    if len(steps) < 2 or total == 0:
        return None
    rank = waits.index(total)
    where, parameter, lost_ns = _where_lost(steps[rank], [step for other, step in enumerate(steps) if other != rank])
    return Straggler(rank, steps[rank].index, round(total / (len(steps) - 1)), where, parameter, lost_ns)


def _where_lost(late: Step, others: Sequence[Step]) -> tuple[str, int | None, int]:
    """Where it fell furthest behind the fastest of the others, that is, where its lateness grew most."""
    ready = [dict(step.gradients) for step in others]
    # The points of a step: when this rank reached them, and when the others did.
    places: list[tuple[str, int | None, int, list[int]]] = [
        ("start", None, late.forward_begin_ns, [step.forward_begin_ns for step in others]),
        ("forward", None, late.backward_begin_ns, [step.backward_begin_ns for step in others]),
    ]
    for param, time_ns in late.gradients:
        places.append(("backward", param, time_ns, [times[param] for times in ready if param in times]))
    lost: list[tuple[str, int | None, int]] = []
    behind_ns = 0
    for where, parameter, time_ns, reached in places:
        if reached:
            now_ns = time_ns - min(reached)
            lost.append((where, parameter, now_ns - behind_ns))
            behind_ns = now_ns
    return max(lost, key=lambda place: place[2])
