"""The test for stragglers, on simulated times: whom it names, when, and that it names none of equal ranks."""

import random
from collections.abc import Callable, Iterator
from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchddp.diagnose.straggler_bets import CORE, Rows, Sample, Sampler, StragglerTest, medians_of_others
from torchddp.diagnose.stragglers import compare_buckets, describe, describe_buckets

STEP_NS = 50_000_000
SHARES = {"data": 0.1, "microbatches": 0.0, "forward": 0.3, "backward": 0.6}
Times = dict[str, float]
Change = Callable[[int, list[Times]], None]  # of the times of a step, by rank


def rows_of(seed: int, ranks: int, noise: float, change: Change = lambda step, times: None) -> Iterator[list[Sample]]:
    """Samples of one step. ``noise``: the standard deviation of each part, relative to its mean."""
    draw = random.Random(seed)
    for step in count():
        times = [
            {name: share * STEP_NS * max(0.1, draw.gauss(1, noise)) for name, share in SHARES.items()}
            | {"core": 0.0, "sending": 0.0}
            for _ in range(ranks)
        ]
        change(step, times)
        totals = [sum(each[name] for name in SHARES) for each in times]
        row = []
        for each, total in zip(times, totals, strict=True):
            own = [int(each[name]) for name in SHARES]
            waited = int(max(totals) - total + 0.1 * STEP_NS + each["sending"])
            row.append(Sample(step, 1, *own, waited, int(each["core"]), int(10**18 + each["sending"])))
        yield row


def slower(rank: int, part: str, factor: float = 1.2, begin: int = 0, end: int = 10**9) -> Change:
    def change(step: int, times: list[Times]) -> None:
        if begin <= step < end:
            times[rank][part] += (factor - 1) * STEP_NS

    return change


def events(rows: Iterator[list[Sample]], steps: int, ranks: int) -> list[tuple[int, int, str]]:
    """When the finding changed: the number of steps, the rank and the part; (n, -1, "") for its end."""
    test, found, last = StragglerTest(["host"] * ranks), [], (-1, "")
    for number, row in enumerate(islice(rows, steps), 1):
        test.add(row)
        now = (-1, "") if test.named is None else (test.named.rank, test.named.part)
        if now != last:
            found.append((number, *now))
        last = now
    return found


@pytest.mark.parametrize("part", ["data", "microbatches", "forward", "backward", "sending"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_is_20_percent_slower_is_named_within_20_steps(part: str, ranks: int) -> None:
    late = 0
    for seed in range(40):
        rank = seed % ranks
        ((number, *named),) = events(rows_of(seed, ranks, 0.05, slower(rank, part, begin=50)), 85, ranks)
        assert named == [rank, part], seed
        late += number > 70
    assert late <= 2


def bursts(rate: float, steps: int) -> Change:
    """One rank at a time is much slower, for up to so many steps."""
    draw = random.Random(7)
    left: dict[int, int] = {}

    def change(step: int, times: list[Times]) -> None:
        for rank, of_rank in enumerate(times):
            if left.get(rank, 0) == 0 and draw.random() < rate:
                left[rank] = draw.randint(2, steps)
            if left.get(rank, 0):
                left[rank] -= 1
                of_rank["backward"] += 0.4 * STEP_NS

    return change


def shared_core(step: int, times: list[Times]) -> None:
    """A process takes the core of one rank for 50 steps, and then that of another."""
    rank = step // 50 % len(times)
    times[rank]["forward"] += 0.6 * STEP_NS
    times[rank]["core"] += 0.6 * STEP_NS


def validation(step: int, times: list[Times]) -> None:
    if step % 500 == 499:
        times[0]["data"] += 100 * STEP_NS


EQUAL = {
    "little noise": (0.05, lambda: lambda step, times: None),
    "much noise": (1.0, lambda: lambda step, times: None),
    "bursts": (0.05, lambda: bursts(0.02, 10)),
    "shared cores": (0.05, lambda: shared_core),
    "validation on rank 0": (0.05, lambda: validation),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_ranks_are_not_named_in_10000_steps(name: str) -> None:
    noise, change = EQUAL[name]
    assert events(rows_of(4, 4, noise, change()), 10_000, 4) == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", EQUAL)
def test_equal_ranks_are_not_named_with_many_seeds(name: str) -> None:
    noise, change = EQUAL[name]
    named = [seed for seed in range(30) if events(rows_of(seed, 2, noise, change()), 10_000, 2)]
    assert len(named) <= (1 if name == "bursts" else 0), named


def test_changes_are_named_and_the_end() -> None:
    changes = [slower(1, "data", begin=50, end=120), slower(2, "data", begin=120, end=190)]
    changes += [slower(2, "forward", 1.4, begin=190, end=260)]

    def change(step: int, times: list[Times]) -> None:
        for each in changes:
            each(step, times)

    found = events(rows_of(1, 4, 0.03, change), 330, 4)
    assert [each[1:] for each in found] == [(1, "data"), (2, "data"), (2, "forward"), (-1, "")]
    for (number, *_), begin in zip(found, (50, 120, 190, 260), strict=True):
        assert begin + 10 <= number <= begin + 22, found


def test_a_shared_core_is_named_if_it_lasts() -> None:
    def change(step: int, times: list[Times]) -> None:
        times[1]["backward"] += 0.5 * STEP_NS
        times[1]["core"] += 0.5 * STEP_NS

    ((number, *named),) = events(rows_of(3, 3, 0.05, change), 2000, 3)
    assert named == [1, CORE] and 40 <= number * 1.6 * STEP_NS / 1e9 <= 90


def test_a_rank_that_is_slow_in_every_eighth_step_is_named_in_the_end() -> None:
    def change(step: int, times: list[Times]) -> None:
        times[0]["data"] += 2.0 * STEP_NS * (step % 8 == 0)

    ((number, *named),) = events(rows_of(3, 2, 0.05, change), 2000, 2)
    assert named == [0, "data"] and number > 100


def test_small_differences_are_not_named() -> None:
    assert events(rows_of(5, 2, 0.02, slower(1, "forward", 1.08)), 3000, 2) == []

    def change(step: int, times: list[Times]) -> None:  # 20% of 4% of a step
        for rank, of_rank in enumerate(times):
            of_rank.update(data=0.0, forward=0.0, backward=0.04 * STEP_NS * (1.2 if rank else 1.0))

    rows = ([sample._replace(waited=STEP_NS) for sample in row] for row in rows_of(5, 2, 0.0, change))
    assert events(rows, 200, 2) == []


def test_all_slow_ranks_are_listed() -> None:
    def change(step: int, times: list[Times]) -> None:
        for rank in (1, 3):
            times[rank]["forward"] += 0.3 * STEP_NS

    test = StragglerTest(["host"] * 8)
    for row in islice(rows_of(1, 8, 0.02, change), 40):
        test.add(row)
    found = test.named
    assert found is not None and {found.rank, *found.also} == {1, 3}
    text = describe(found)
    assert "makes the others wait" in text and "most of it in forward" in text and "forward 30." in text
    assert f"; as slow: rank {found.also[0]}" in text and "microbatches" not in text


def test_sending_is_only_compared_on_one_host() -> None:
    rows = rows_of(0, 4, 0.03, slower(1, "sending"))
    test = StragglerTest(["a", "b", "c", "c"])
    for row in islice(rows, 200):
        test.add(row)
    assert test.named is None


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_medians_of_others(values: list[float]) -> None:
    for rank, found in enumerate(medians_of_others(values)):
        rest = sorted(values[:rank] + values[rank + 1 :])
        assert found == (rest[(len(rest) - 1) // 2] + rest[len(rest) // 2]) / 2


@settings(deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=80), st.lists(st.floats(0.5, 2), min_size=2, max_size=3))
def test_samples_of_ranks_are_put_together(durations_ms: list[int], factors: list[float]) -> None:
    """Although ranks measure other durations. Each step's time is its number, so sums tell which are in a sample."""
    rows = Rows(len(factors))
    covered = []
    for rank, factor in enumerate(factors):
        sampler, samples = Sampler(), []
        for step, duration_ms in enumerate(durations_ms):
            if sampler.add(step, int(duration_ms * factor * 1e6), (step, 0, 1, 0, 0, 0)):
                samples.append(sampler.take(rank))
        for begin in range(0, len(samples), 3):
            rows.add(rank, samples[max(0, begin - 2) : begin + 3])  # posts overlap
            covered += list(rows.take()) if rank == len(factors) - 1 else []
    ends = [0]
    for row in covered:
        assert len({(sample.begin, sample.steps) for sample in row}) == 1 and row[0].begin >= ends[-1]
        for rank, sample in enumerate(row):
            assert sample.data == sum(range(sample.begin, sample.end)) and sample.forward == sample.steps
            assert sample.core % (rank or 1) == 0
        ends.append(row[0].end)
    if min(durations_ms) * min(factors) >= 30:
        assert ends[-1] == len(durations_ms)


def test_a_rank_that_stops_leaves_the_others_unnamed() -> None:
    rows = Rows(2)
    rows.add(0, [Sample(step, 1, 1, 0, 0, 0, 0, 0, 0) for step in range(1000)])
    assert list(rows.take()) == []
    rows.add(1, [Sample(step, 1, 1, 0, 0, 0, 0, 0, 0) for step in range(998, 1000)])
    assert [row[0].begin for row in rows.take()] == [998, 999]


def test_buckets_are_compared_with_the_others_median() -> None:
    ms = 10**6
    ranks = [
        (2, [(20 * ms, 2 * ms), (40 * ms, 40 * ms)]),
        (1, [(13 * ms, 0), (50 * ms, 0)]),
        (1, [(12 * ms, 3 * ms)] * 2),
    ]
    late = compare_buckets(1, ranks)
    assert [time for bucket in late for time in bucket] == pytest.approx([0.002, 0.002, 0.034, 0.0115])
    ready, wait = "bucket 0 by 2.0 ms, bucket 1 by 34.0 ms", "wait longest for bucket 1: 11.5 ms"
    assert describe_buckets(late) == f". Ready later than the others': {ready}. The others {wait}"
    assert compare_buckets(1, [*ranks, (0, [])]) == [] and describe_buckets([]) == ""
