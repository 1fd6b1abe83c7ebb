"""Finds the rank that makes the others wait, from the times of all ranks. Pure.

Note [The test for stragglers]

Ranks are compared by their own time: a step without the wait for other ranks. A sample is one step, or a power of two
of them that takes at least 30 ms, so that 20 samples are 20 steps or about a second. In each, a rank is marked if its
own time is more than 5% above the median of the others'. Of equal ranks, each is above the others' median with a
probability of at most 1/2, whatever the distribution of their times, and with the margin far less often.

For each rank, a bet against "at most 1/2" multiplies a capital by 1.9 after a mark and by 0.1 otherwise, and starts
anew at 1 whenever it is below. Such a CUSUM of betting e-values is an e-detector (Shin, Ramdas, Rinaldo: E-detectors: a
nonparametric framework for sequential change detection, arXiv:2203.03532): it may be looked at after every sample, and
under the null hypothesis it takes C samples or more on average until it exceeds C. C is 5,000 times the number of
ranks (Bonferroni), which 15 marks in a row exceed at two ranks. Equal ranks take much longer, as their marks are rarer
than 1/2. A rank is named if it was also 10% slower over those samples, and the difference is 5% of a step or more.

By that hypothesis no rank is slower for a while, which on real hosts they are. So C grows with the largest capital of
runs of marks that ended by themselves: after pauses of 10 samples, naming a rank takes 24 marks, and never more than
twice as many as at first.

The most common pause is a process that takes a rank's core. The time that the training thread was runnable without a
core (schedstat) does not count against a rank, but does not excuse the others either, because part of it may lie in
their waits. A second test without that correction, over samples of 3 s, finds in about a minute what this hides, and
also a rank that is slow in some steps only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log
from statistics import median
from typing import NamedTuple

SAMPLE_NS, LONG_SAMPLE_NS = 30_000_000, 3_000_000_000
MARGIN = 1.05
LEAST_RATIO, LEAST_SHARE = 1.10, 0.05
_RIGHT, _WRONG = log(1.9), log(0.1)
_FORGET = 0.9995  # of the restlessness, per sample
_USUAL = _RIGHT  # single marks are common
_SAMPLES_PER_RANK = 5000  # see the note: until a false alarm
_MOST_WAITING = 256  # samples of a rank, while another has none
_KEPT = 20  # samples of which a finding tells
_WORSE = 1.25  # how many times as slow another rank must be to take the named one's place

PARTS = ("data", "microbatches", "forward", "backward", "sending")
CORE = "core"


class Sample(NamedTuple):
    """Sums over a rank's steps ``begin`` to ``begin + steps``, in ns. A step ends before the next one's forward."""

    begin: int
    steps: int
    data: int  # and whatever else the program does between backward and forward
    microbatches: int
    forward: int
    backward: int
    waited: int  # for other ranks
    core: int  # the training thread was runnable, but had no core
    left: int  # the times at which the reductions ended, on the host's wall clock

    @property
    def end(self) -> int:
        return self.begin + self.steps

    @property
    def duration(self) -> int:
        return self.data + self.microbatches + self.forward + self.backward + self.waited


def merged(samples: Sequence[Sample]) -> Sample:
    """Successive samples as one."""
    _, *sums = (sum(values) for values in zip(*samples, strict=True))
    return Sample(samples[0].begin, *sums)


class Sampler:
    """Collects one rank's steps into samples that begin at multiples of their lengths, so that other ranks' fit."""

    def __init__(self) -> None:
        self._length = 1
        self.drop()

    def drop(self) -> None:
        self._steps: list[tuple[int, ...]] = []
        self._begin = self._took_ns = 0

    def add(self, step: int, took_ns: int, times: tuple[int, ...]) -> bool:
        """Whether this step completes a sample, to `take` before the next. ``times``: of `Sample`, without the core."""
        if self._steps and step != self._begin + len(self._steps):
            self.drop()
        if not self._steps:
            if step % self._length:
                return False
            self._begin = step
        self._steps.append(times)
        self._took_ns += took_ns
        if (step + 1) % self._length:
            return False
        if self._took_ns >= SAMPLE_NS:
            return True
        self._length *= 2
        if self._begin % self._length:
            self.drop()
        return False

    def take(self, core_ns: int) -> Sample:
        """The finished sample, given how long the thread had no core in it."""
        data, microbatches, forward, backward, waited, left = (sum(values) for values in zip(*self._steps, strict=True))
        own = data, microbatches, forward, backward
        sample = Sample(self._begin, len(self._steps), *own, waited, core_ns, left)
        if self._took_ns >= 4 * SAMPLE_NS and self._length > 1:
            self._length //= 2
        self.drop()
        return sample


class Rows:
    """Puts together the samples of all ranks for the same steps, although ranks may choose other lengths."""

    def __init__(self, ranks: int) -> None:
        self._waiting: list[deque[Sample]] = [deque(maxlen=_MOST_WAITING) for _ in range(ranks)]
        self._known = [0] * ranks

    def add(self, rank: int, samples: Iterable[Sample]) -> None:
        """Samples that have come before are left out."""
        for sample in samples:
            if sample.begin >= self._known[rank]:
                self._waiting[rank].append(sample)
                self._known[rank] = sample.end

    def take(self) -> Iterator[list[Sample]]:
        """By rank, one sample each. Steps that a rank lacks are left out."""
        while all(self._waiting):
            begin = max(waiting[0].begin for waiting in self._waiting)
            if behind := [waiting for waiting in self._waiting if waiting[0].begin < begin]:
                for waiting in behind:
                    waiting.popleft()
                continue
            end = max(waiting[0].end for waiting in self._waiting)
            if any(waiting[-1].end < end for waiting in self._waiting):
                return
            row = [
                [waiting.popleft() for _ in range(sum(sample.begin < end for sample in waiting))]
                for waiting in self._waiting
            ]
            if all(sum(sample.steps for sample in samples) == end - begin for samples in row):
                yield [merged(samples) for samples in row]


Own = tuple[int, ...]  # one rank's own times in a sample, by part


def own_times(row: Sequence[Sample], hosts: Sequence[str]) -> list[Own]:
    """By rank. Sending is the part of a rank's waits after the end of the reductions on other ranks of its host.

    A rank whose reductions end later because it begins later doesn't wait, and need not make others wait: reductions
    that are over before the end of backward let ranks stay behind each other by the rest of it.
    """
    first: dict[str, int] = {}
    for sample, host in zip(row, hosts, strict=True):
        first[host] = min(sample.left, first.get(host, sample.left))
    return [
        (s.data, s.microbatches, s.forward, s.backward, min(s.waited, s.left - first[host]))
        for s, host in zip(row, hosts, strict=True)
    ]


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value, the median of all but this one."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    for place, rank in enumerate(order):
        low, high = (values[order[at + (at >= place)]] for at in ((len(values) - 2) // 2, (len(values) - 1) // 2))
        found[rank] = (low + high) / 2
    return found


class Look(NamedTuple):
    """One rank in some steps, compared with the medians of the others."""

    own: Own
    others: tuple[float, ...]
    total: int
    others_total: float
    core: int
    others_duration: float  # with their waits

    @staticmethod
    def at(rank: int, row: Sequence[Sample], hosts: Sequence[str]) -> Look:
        times = own_times(row, hosts)
        own = times.pop(rank)
        others = [sample.duration for other, sample in enumerate(row) if other != rank]
        medians = tuple(median(part) for part in zip(*times, strict=True))
        return Look(own, medians, sum(own), median(map(sum, times)), row[rank].core, median(others))

    def ratio(self, corrected: bool) -> float:
        return (self.total - corrected * self.core) / max(self.others_total, 1)

    @property
    def excess(self) -> float:
        return self.total - self.others_total

    @property
    def part(self) -> str:
        """Where it loses most."""
        return max(zip(PARTS, self.own, self.others, strict=True), key=lambda part: part[1] - part[2])[0]

    def matters(self, corrected: bool) -> bool:
        return self.ratio(corrected) >= LEAST_RATIO and self.excess >= LEAST_SHARE * self.others_duration


class Evidence:
    """A bet that marks come with a probability above 1/2: see the note."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.log_capital, self.samples, self.peak = 0.0, 0, 0.0

    def add(self, marked: bool, most: float) -> float:
        """``most``: where the logarithm of the capital ends. Returns the peak of a run of marks that ends here."""
        self.log_capital = min(most, self.log_capital + (_RIGHT if marked else _WRONG))
        self.peak = max(self.peak, self.log_capital)
        self.samples += 1
        ended = 0.0
        if self.log_capital <= 0:
            ended = self.peak
            self.reset()
        return ended


@dataclass(frozen=True)
class Finding:
    """The rank that the others wait for, in steps ``first`` to ``last``; times per step in ns."""

    rank: int
    part: str  # one of PARTS, or CORE
    ratio: float  # its own time, relative to the median of the others'
    first: int
    last: int
    own: tuple[float, ...]  # by part
    others: tuple[float, ...]
    core: float
    excess: float
    also: tuple[int, ...]  # other ranks that are slow


class Detector:
    """The test over samples of one length. ``named``: the current finding. ``corrected``: for the lack of a core."""

    def __init__(self, hosts: Sequence[str], *, corrected: bool) -> None:
        self._hosts, self._corrected = hosts, corrected
        self._enough = log(_SAMPLES_PER_RANK * len(hosts))
        self._restless = 0.0
        self.reset()

    def reset(self) -> None:
        self.named: Finding | None = None
        self._slow = [Evidence() for _ in self._hosts]
        self._over, self._other_part = Evidence(), Evidence()
        self._rows: deque[Sequence[Sample]] = deque(maxlen=_KEPT)

    def add(self, row: Sequence[Sample]) -> None:
        self._rows.append(row)
        totals = [sum(own) for own in own_times(row, self._hosts)]
        marks = [
            total - self._corrected * sample.core > MARGIN * others
            for total, sample, others in zip(totals, row, medians_of_others(totals), strict=True)
        ]
        most = self._enough + self._restless + log(2)  # little more than enough, so that it takes few samples to lose
        self._restless *= _FORGET
        for rank, (evidence, marked) in enumerate(zip(self._slow, marks, strict=True)):
            ended = evidence.add(marked, most)
            if self.named is None or rank != self.named.rank:
                self._restless = max(self._restless, min(ended - _USUAL, self._enough))
        if self.named is not None:
            is_marked = marks[self.named.rank]
            self._over.add(not is_marked, most)
            self._other_part.add(
                is_marked and Look.at(self.named.rank, row, self._hosts).part != self._part, self._enough
            )
        self._decide()

    def _decide(self) -> None:
        if self.named is not None and self._over.log_capital >= self._enough:
            self.named = None
        named = -1 if self.named is None else self.named.rank
        may_change = self._other_part.log_capital >= self._enough
        enough = [
            rank for rank, evidence in enumerate(self._slow) if evidence.log_capital >= self._enough + self._restless
        ]
        if enough == [named] and not may_change:
            return
        looks = {rank: look for rank in enough if (look := self._look(rank)).matters(self._corrected)}
        if not looks:
            return
        worst = max(looks, key=lambda rank: looks[rank].excess)
        if named in looks and looks[worst].excess <= _WORSE * looks[named].excess:
            worst = named
        if worst != named or (may_change and looks[worst].part != self._part):
            self._name(worst, looks[worst], tuple(rank for rank in looks if rank != worst))

    def _window(self, rank: int) -> list[Sequence[Sample]]:
        """The samples of the evidence against this rank."""
        return list(islice(self._rows, max(0, len(self._rows) - self._slow[rank].samples), None))

    def _look(self, rank: int) -> Look:
        row = [merged(of_rank) for of_rank in zip(*self._window(rank), strict=True)]
        return Look.at(rank, row, self._hosts)

    def _name(self, rank: int, look: Look, also: tuple[int, ...]) -> None:
        window = self._window(rank)
        steps = sum(row[0].steps for row in window)
        self._part = look.part
        self._over.reset()
        self._other_part.reset()
        self.named = Finding(
            rank,
            look.part if look.ratio(corrected=True) >= LEAST_RATIO else CORE,
            look.ratio(corrected=False),
            window[0][0].begin,
            window[-1][0].end - 1,
            tuple(value / steps for value in look.own),
            tuple(value / steps for value in look.others),
            look.core / steps,
            look.excess / steps,
            also,
        )


class StragglerTest:
    """Both tests of the note. ``hosts``: by rank; ranks with equal names read the same clock."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._quick, self._long = Detector(hosts, corrected=True), Detector(hosts, corrected=False)
        self._rows: list[Sequence[Sample]] = []

    @property
    def named(self) -> Finding | None:
        return self._quick.named or self._long.named

    def add(self, row: Sequence[Sample]) -> None:
        """One sample of each rank, of the same steps."""
        before = self._quick.named
        self._quick.add(row)
        now = self._quick.named
        if before is not None and (now is None or now.rank != before.rank):
            self._long.reset()
            self._rows.clear()
        self._rows.append(row)
        if sum(samples[0].duration for samples in self._rows) >= LONG_SAMPLE_NS:
            self._long.add([merged(samples) for samples in zip(*self._rows, strict=True)])
            self._rows.clear()
