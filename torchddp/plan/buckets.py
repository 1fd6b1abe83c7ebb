"""Finds the buckets with the least exposed time from measured ready times and the cost of a message (MG-WFBP: Shi, Chu
and Li, INFOCOM 2019). Pure.

Gradients, in the order in which they become ready, are cut into runs. A run becomes one bucket for each kind of
gradient in it. Buckets share one channel, in order: each starts once its gradients are ready and the previous is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from torchddp.plan.step_profile import Gradient, LinearCost

if TYPE_CHECKING:
    from torchddp import _C

    Specs = Sequence[_C.ParamSpec] | Sequence[Gradient]

Buckets = tuple[tuple[int, ...], ...]  # parameter indices of each bucket, in the order of launch
# The last bucket may finish later by this share of backward, to save messages, which also cost host time.
SLACK_SHARE = 0.002
# Gradients of one kind, which share a bucket: the kind, when the last of them is ready, bytes, seconds per byte.
_Part = tuple[int, float, int, float]


class _Run:
    """A run of consecutive gradients, as the buckets that it becomes."""

    def __init__(self, cost: LinearCost, parts: Iterable[_Part] = ()) -> None:
        self._cost, self._packed_s_per_byte = cost, _s_per_byte(cost, 2)
        self._parts: dict[int, _Part] = {}  # by kind, in reverse order of launch
        self.work_s = 0.0  # the time that its buckets take on the channel
        self.tail_s = 0.0  # when its last bucket finishes, if the channel is otherwise free
        for part in parts:
            self.prepend(part)

    def finish_s(self, free_s: float) -> float:
        """When its last bucket finishes, if the channel is free from ``free_s`` on."""
        return max(free_s + self.work_s, self.tail_s)

    def prepend(self, part: _Part) -> None:
        kind, ready_s, nbytes, _ = part
        if kind in self._parts:
            _, ready_s, later_nbytes, _ = self._parts[kind]
            part = (kind, ready_s, nbytes + later_nbytes, self._packed_s_per_byte)
        self._parts[kind] = part
        alpha_s = self._cost.alpha_s
        work_s = tail_s = 0.0
        for _, ready_s, nbytes, s_per_byte in self._parts.values():
            work_s += alpha_s + nbytes * s_per_byte
            if ready_s + work_s > tail_s:
                tail_s = ready_s + work_s
        self.work_s, self.tail_s = work_s, tail_s

    def after(self, run: _Run) -> _Run:
        return _Run(self._cost, (*self._parts.values(), *run._parts.values()))


def planned_buckets(specs: Specs, order: Sequence[int], ready_s: Sequence[float], cost: LinearCost) -> Buckets:
    """The buckets that finish first, with a slack of ``SLACK_SHARE``: see `merged_buckets`."""
    return merged_buckets(specs, order, ready_s, cost, SLACK_SHARE * max(ready_s))


def buckets_of(plan: _C.BucketPlan) -> Buckets:
    return tuple(tuple(bucket.params) for bucket in plan.buckets)


def merged_buckets(
    specs: Specs, order: Sequence[int], ready_s: Sequence[float], cost: LinearCost, slack_s: float = 0.0
) -> Buckets:
    """The buckets that finish first, over all ways to cut ``order`` into runs.

    Exact, by dynamic programming over the cuts, O(n^2) at worst. Neighboring runs are then merged, to send fewer
    messages, as long as the last bucket finishes at most ``slack_s`` later. ``order``: indices of ``specs`` as they
    become ready. ``ready_s``: by parameter, in seconds since backward began, raised to that of earlier ones.

    ValueError: times or costs that are negative or not finite; an order that is not a permutation.
    """
    if sorted(order) != list(range(len(specs))):
        raise ValueError(f"order is over {len(specs)} parameters: each must occur exactly once, got {[*order]}")
    _check(len(specs), ready_s, cost, slack_s)
    if not order:
        return ()
    line: list[_Part] = []
    kinds: dict[tuple[int, ...], int] = {}
    latest_s = 0.0
    for index in order:
        spec = specs[index]
        # Gradients of one kind share a bucket; a sparse gradient has its own.
        key = (spec.dtype, spec.device, spec.owner, index if spec.sparse else -1)
        latest_s = max(latest_s, ready_s[index])
        line.append((kinds.setdefault(key, len(kinds)), latest_s, spec.numel * spec.itemsize, _s_per_byte(cost, 1)))
    cuts, best_s = _best_cuts(line, cost)
    # Slightly more than the optimum, so that rounding does not exclude it.
    cuts = _merge(cuts, line, cost, best_s * (1 + 1e-12) + slack_s)
    return tuple(bucket for begin, end in pairwise(cuts) for bucket in _buckets_of(order[begin:end], line[begin:end]))


def finish_s(buckets: Buckets, specs: Specs, ready_s: Sequence[float], cost: LinearCost) -> float:
    """When the last bucket is reduced, in seconds since backward began. ValueError: see `merged_buckets`."""
    _check(len(specs), ready_s, cost)
    free_s = 0.0
    for bucket in buckets:
        nbytes = sum(specs[index].numel * specs[index].itemsize for index in bucket)
        message_s = cost.alpha_s + nbytes * _s_per_byte(cost, len(bucket))
        free_s = max(free_s, *(ready_s[index] for index in bucket)) + message_s
    return free_s


def _s_per_byte(cost: LinearCost, count: int) -> float:
    """Seconds per byte of a bucket of ``count`` gradients; a single gradient is not copied."""
    return cost.beta_s_per_byte + (cost.pack_s_per_byte if count > 1 else 0.0)


def _best_cuts(line: Sequence[_Part], cost: LinearCost) -> tuple[list[int], float]:
    """The cuts between the runs that finish first, and when the last run finishes."""
    free_s = [0.0]  # when the channel is free after the first 0, 1, .. gradients
    begins = [0]  # where the last run among them begins
    for end in range(1, len(line) + 1):
        run = _Run(cost)
        best_s, best_begin = math.inf, 0
        for begin in reversed(range(end)):
            run.prepend(line[begin])
            this_s = run.finish_s(free_s[begin])
            if this_s <= best_s:  # in a tie, prefer the longest run
                best_s, best_begin = this_s, begin
            if run.tail_s >= best_s:  # a longer run has more to send, so it can't finish earlier
                break
        free_s.append(best_s)
        begins.append(best_begin)
    cuts = [len(line)]
    while cuts[-1] > 0:
        cuts.append(begins[cuts[-1]])
    return cuts[::-1], free_s[-1]


def _merge(cuts: Sequence[int], line: Sequence[_Part], cost: LinearCost, end_s: float) -> list[int]:
    """Merge runs wherever the last one still finishes by ``end_s``; return the remaining cuts."""
    runs = [_Run(cost, reversed(line[begin:end])) for begin, end in pairwise(cuts)]
    latest_s = [end_s]  # when the last run, the one before it, .. must have finished
    for run in reversed(runs[1:]):
        latest_s.append(latest_s[-1] - run.work_s)
    kept = [0]
    merged, free_s = runs[0], 0.0
    for cut, run, run_latest_s in zip(cuts[1:-1], runs[1:], reversed(latest_s[:-1]), strict=True):
        longer = run.after(merged)
        if longer.finish_s(free_s) <= run_latest_s:
            merged = longer
        else:
            kept.append(cut)
            merged, free_s = run, merged.finish_s(free_s)
    return [*kept, cuts[-1]]


def _buckets_of(run: Sequence[int], line: Sequence[_Part]) -> Iterable[tuple[int, ...]]:
    """Parameter indices by kind, ordered by each kind's last gradient."""
    buckets: dict[int, list[int]] = {}
    for index, (kind, *_) in zip(run, line, strict=True):
        bucket = buckets.pop(kind, [])
        bucket.append(index)
        buckets[kind] = bucket
    return map(tuple, buckets.values())


def _check(count: int, ready_s: Sequence[float], cost: LinearCost, slack_s: float = 0.0) -> None:
    if len(ready_s) != count:
        raise ValueError(f"ready_s has {len(ready_s)} entries for {count} parameters")
    times = {f"ready_s[{index}]": seconds for index, seconds in enumerate(ready_s)}
    costs = {name: getattr(cost, name) for name in ("alpha_s", "beta_s_per_byte", "pack_s_per_byte")}
    for name, value in {**times, **costs, "slack_s": slack_s}.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
