"""A profile's numbers, which text, JSON, picture, page and Chrome trace all take from here: none computes its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torchddp.harness.tables import number
from torchddp.profiler.ranks import MergedProfile, MergedStep
from torchddp.profiler.steps import BUCKET_TIMES, BucketTimes, Step

# A larger share of exposed communication is worth tuning.
MUCH_EXPOSED = 0.1
# What the words of all reports mean. docs/profiling.md has the same text.
TERMS = {
    "step": "From the start of forward until the gradients are final: forward + backward + exposed.",
    "forward": "From the start of forward to the first gradient, including the start of backward.",
    "backward": "From the first gradient to the last.",
    "exposed": "The communication that backward does not hide: from the last gradient until all gradients are final.",
    "communication": "From the first launch until all gradients are final: hidden behind backward + exposed.",
    "overlap": "The hidden share of the communication.",
    "slowest rank": "The rank whose step took longest. The step's numbers are this rank's, so they add up.",
    "straggler": "The rank that the others wait for, if it is last more often than chance explains.",
    "gathering": "From a bucket's first gradient to its last.",
    "first, last ready": "When the bucket's first and last gradient were ready, on the rank that was first or last.",
    "packing": "The bucket's gradients are copied into its buffer; then it is packed.",
    "queued": "Packed, but not launched: buckets are sent in order, so this one waits for an earlier one.",
    "launched": "When the last rank started the bucket's reduction, which can't end before that.",
    "in flight": "Launched, but not done.",
    "done": "When the rank saw that the reduction had ended. It looks at the buckets in order, so some end earlier.",
    "waiting": "The rank has nothing left to do but wait for this bucket.",
    "others waited": "How long the other ranks waited for the last one to launch this bucket, added up.",
    "held back by": "What came last on the rank that launched last: a gradient, or an earlier bucket.",
}


def profile_numbers(profile: MergedProfile) -> dict[str, Any]:
    last = profile.last_rank() if len(profile.records) > 1 else None
    last_rank = straggler = None
    if last is not None:
        last_rank = _in_us({name: value for name, value in vars(last).items() if name != "example"})
        if last.is_straggler:
            parameter = None if last.example.parameter is None else profile.names[last.example.parameter]
            straggler = _in_us({**vars(last.example), "parameter": parameter})
    found = {
        **step_numbers(profile, profile.median_step()),
        "steps_recorded": len(profile.steps),
        "last_rank": last_rank,
        "straggler": straggler,
        "mean_wait_caused_us": [wait_ns / 1e3 for wait_ns in profile.mean_waits_ns()],
        "clocks": len({record.clock_identity for record in profile.records}),
        "clock_uncertainty_us": [clock.uncertainty_ns / 1e3 for clock in profile.clocks],
        "events_dropped": [record.dropped for record in profile.records],
        "steps_incomplete": [record.incomplete for record in profile.records],
        "traffic": [{route: asdict(each) for route, each in record.traffic.items()} for record in profile.records],
    }
    return {"verdict": verdict(found), **found}


def verdict(found: Mapping[str, Any]) -> str:
    last, share = found["last_rank"], found["exposed_us"] / found["step_us"] if found["step_us"] else 0.0
    if found["straggler"] is not None:
        waits = (
            f"each other rank waits {number(last['wait_us'] / 1e3)} ms per step for it, {last['share']:.0%} of a step"
        )
        advice = "Look at its data loading, its threads, and what else runs on its host"
        return f"Rank {last['rank']} is a straggler: on average, {waits}. {advice}."
    taken = f"Exposed communication takes {share:.0%} of the step"
    if share < MUCH_EXPOSED:
        return f"{taken}: other buckets can save no more than that."
    if found["wait_for_ranks_us"] > found["exposed_us"] / 2:
        return f"{taken}, most of it a wait for a later rank, which other buckets can't shorten."
    return f"{taken}; `torchddp tune` tries other buckets."


def step_numbers(profile: MergedProfile, step: MergedStep) -> dict[str, Any]:
    """One step of all ranks. Times in us since the first rank began forward, on rank 0's clock."""
    zero_ns, names = min(rank.forward_begin_ns for rank in step.steps), profile.names
    ranks = [
        {"rank": record.rank, "host": record.host, **_rank_numbers(rank_step, names, zero_ns)}
        for record, rank_step in zip(profile.records, step.steps, strict=True)
    ]
    slowest = ranks[step.slowest]
    headline = ("step_us", "forward_us", "backward_us", "exposed_us", "hidden_us", "comm_us", "overlap_ratio")
    buckets = []
    for b in step.buckets:
        last_rank = None if b.last_rank is None else ranks[b.last_rank]["rank"]
        waits = _in_us({"last_rank": last_rank, "late_ns": b.late_ns, "wait_ns": b.wait_ns})
        buckets.append(_bucket_numbers(b, names, zero_ns) | waits)
    return {
        "step": step.index,
        "world_size": len(ranks),
        "slowest_rank": slowest["rank"],
        **{name: slowest[name] for name in headline},
        "wait_for_ranks_us": step.wait_for_ranks_ns(step.slowest) / 1e3,
        "buckets": buckets,
        "ranks": ranks,
    }


def _rank_numbers(step: Step, names: Sequence[str], zero_ns: int) -> dict[str, Any]:
    times = ("forward_begin_ns", "backward_begin_ns", "compute_end_ns", "backward_end_ns")
    return {
        **_in_us({name: getattr(step, name) for name in times}, zero_ns),
        "step_us": step.duration_ns / 1e3,
        "forward_us": (step.backward_begin_ns - step.forward_begin_ns) / 1e3,
        "backward_us": (step.compute_end_ns - step.backward_begin_ns) / 1e3,
        "exposed_us": step.exposed_ns / 1e3,
        "hidden_us": step.hidden_ns / 1e3,
        "comm_us": step.comm_ns / 1e3,
        "overlap_ratio": step.overlap_ratio,
        "buckets": [_bucket_numbers(bucket, names, zero_ns) for bucket in step.buckets],
    }


def _bucket_numbers(bucket: BucketTimes, names: Sequence[str], zero_ns: int) -> dict[str, Any]:
    return {
        "bucket": bucket.index,
        "bytes": bucket.nbytes,
        "parameters": [names[param] for param in bucket.params],
        **_in_us({name: getattr(bucket, name) for name in BUCKET_TIMES}, zero_ns),
        "held_back_by": None if bucket.holder is None else names[bucket.holder],
        "queued_behind_bucket": bucket.behind,
    }


def spans(rank: Mapping[str, Any]) -> list[tuple[int, str, float, float]]:
    """(row, what, start, end) of one rank's numbers: row 0 is autograd's, the others the buckets', in order."""
    found = [
        (0, "forward", rank["forward_begin_us"], rank["backward_begin_us"]),
        (0, "backward", rank["backward_begin_us"], rank["compute_end_us"]),
        (0, "exposed", rank["compute_end_us"], rank["backward_end_us"]),
    ]
    for row, bucket in enumerate(rank["buckets"], 1):
        found += [
            (row, "gathering", bucket["first_ready_us"], bucket["last_ready_us"]),
            (row, "packing", bucket["last_ready_us"], bucket["packed_us"]),
            (row, "queued", bucket["packed_us"], bucket["launched_us"]),
            (row, "in flight", bucket["launched_us"], bucket["done_us"]),
            (row, "waiting", bucket["wait_begin_us"], bucket["done_us"]),
        ]
    return [span for span in found if span[2] is not None and span[3] is not None and span[3] > span[2]]


def held_back_by(bucket: Mapping[str, Any]) -> str:
    """The parameter or the earlier bucket that the bucket waited for, or that it was skipped."""
    if bucket["launched_us"] is None:
        return "(skipped: unused)"
    behind = bucket["queued_behind_bucket"]
    return f"bucket {behind}" if behind is not None else bucket["held_back_by"] or ""


def _in_us(values: Mapping[str, Any], zero_ns: int = 0) -> dict[str, Any]:
    """With those that end in `_ns` in us since `zero_ns`."""
    times = {f"{n[:-3]}_us": None if v is None else (v - zero_ns) / 1e3 for n, v in values.items() if n[-3:] == "_ns"}
    return {name: value for name, value in values.items() if name[-3:] != "_ns"} | times
