"""Reports a profile as text of at most 80 columns, and as a dict for JSON."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchddp.harness.tables import adding_up, number, plain_table, ranks_text
from torchddp.profiler.ranks import (
    SIGNIFICANCE,
    Clock,
    MergedBucket,
    MergedProfile,
    MergedStep,
    RankRecord,
    Straggler,
    chance_to_be_last,
    merge,
    traffic_dicts,
)
from torchddp.profiler.steps import BUCKET_TIMES, BucketTimes, Step
from torchddp.traffic import text_of, total_wire_bytes

WIDTH = 80
FOOTNOTE = (
    "Times are in ms since the first rank began backward; launched is the last rank's. done is an upper bound: the "
    "waiting thread takes the buckets in order."
)
# A larger share of exposed communication is worth tuning.
MUCH_EXPOSED = 0.1


def as_text(renderable: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def ms(time_ns: float) -> str:
    return number(time_ns / 1e6)


def verdict(profile: MergedProfile, step: MergedStep) -> str:
    """The result in a sentence."""
    last, slowest = profile.last_rank(), step.steps[step.slowest]
    share = slowest.exposed_ns / slowest.duration_ns if slowest.duration_ns else 0.0
    if last is not None and last.is_straggler:
        waits = f"each other rank waits {ms(last.wait_ns)} ms per step for it, {last.share:.0%} of the step"
        return f"Rank {last.rank} is a straggler: {waits}."
    if share >= MUCH_EXPOSED:
        return f"Exposed communication takes {share:.0%} of the step; `torchddp tune` tries other buckets."
    return f"Backward hides most communication: the exposed rest takes {share:.0%} of the step."


def rank_report(record: RankRecord) -> RenderableType:
    """The median step of one rank. Raises ValueError if it has no complete step."""
    if not record.steps:
        raise ValueError("no complete step was recorded: run forward and backward inside the profile")
    profile = merge([record], [Clock()])
    return _report(profile, f" of rank {record.rank}, the median of {len(record.steps)}")


def merged_report(profile: MergedProfile) -> RenderableType:
    """The median step of all ranks, and the straggler, if there is one."""
    return _report(profile, f", the median of {len(profile.steps)}, {ranks_text(len(profile.records))}")


def _report(profile: MergedProfile, title: str) -> RenderableType:
    step = profile.median_step()
    table = bucket_table(step, profile.names, f"Step {step.index}{title}")
    lines = [
        *summary_of(profile, step),
        *sent_lines(profile.records),
        *straggler_lines(profile),
        *clock_lines(profile),
        *lost_lines(profile.records),
    ]
    return Group(table, "", *map(Text, lines), Text(FOOTNOTE, style="dim"))


def bucket_table(step: MergedStep, names: Sequence[str], title: str) -> Table:
    last_rank = ["last\nrank"] if len(step.steps) > 1 else []
    columns = ("MB", "first\nready", "last\nready", "packed", "launched", "done", *last_rank)
    table = plain_table(title, "bucket", *columns)
    table.columns[0].justify = "right"
    table.add_column("held back by", overflow="fold")
    for row in bucket_rows(step, names):
        table.add_row(*map(Text, row))  # a name must not be read as markup
    return table


def bucket_rows(step: MergedStep, names: Sequence[str]) -> list[list[str]]:
    """The table's cells. Times are in ms since the first rank began backward."""
    zero_ns = min(rank.backward_begin_ns for rank in step.steps)
    rows = []
    for bucket in step.buckets:
        times = [getattr(bucket, name) for name in BUCKET_TIMES]
        cells = [
            str(bucket.index),
            f"{bucket.nbytes / 1e6:.2f}",
            *("" if t is None else ms(t - zero_ns) for t in times),
        ]
        if len(step.steps) > 1:
            cells.append("" if bucket.last_rank is None else str(bucket.last_rank))
        rows.append([*cells, held_back_by(bucket, names)])
    return rows


def held_back_by(bucket: MergedBucket, names: Sequence[str]) -> str:
    """The parameter or the earlier bucket that the bucket waited for, or that it was skipped."""
    if bucket.last_rank is None:
        return "(skipped: unused)"
    if bucket.behind is not None:
        return f"bucket {bucket.behind}"
    return "" if bucket.holder is None else names[bucket.holder]


def summary_of(profile: MergedProfile, step: MergedStep) -> list[str]:
    """Where the step's time went on the slowest rank."""
    slowest = step.steps[step.slowest]
    ends_ns = (slowest.forward_begin_ns, slowest.backward_begin_ns, slowest.compute_end_ns, slowest.backward_end_ns)
    total, (forward, backward, exposed) = adding_up([(b - a) / 1e6 for a, b in pairwise(ends_ns)])
    which = f" on rank {profile.records[step.slowest].rank}, the slowest" if len(step.steps) > 1 else ""
    return [
        f"step {total} ms{which} = forward {forward} + backward {backward} + exposed communication {exposed}",
        f"communication took {ms(slowest.comm_ns)} ms, overlap ratio {slowest.overlap_ratio:.2f} (its share before the "
        "last gradient)",
    ]


def sent_lines(records: Sequence[RankRecord]) -> list[str]:
    """The bytes that the rank that sent most has sent in the last step."""
    most = max(records, key=lambda record: total_wire_bytes(record.traffic) or 0)
    of_rank = f", by rank {most.rank}" if any(record.traffic != most.traffic for record in records) else ""
    return [f"sent per step{of_rank}: {text_of(most.traffic)}"]


def straggler_lines(profile: MergedProfile) -> list[str]:
    if len(profile.records) == 1:
        return []
    last = profile.last_rank()
    if last is None:
        return ["straggler: none, no rank waited for another"]
    p_text = "< 0.001" if last.p_value < 0.001 else f"= {last.p_value:.2g}"
    often = f"rank {last.rank} was last in {last.steps} of {last.of} steps (p {p_text})"
    waited = f"each other rank waited {ms(last.wait_ns)} ms per step for it"
    if last.is_straggler:
        return [
            f"straggler: {often}; {waited}",
            f"in step {last.example_step} {_where_text(last.example, profile.names)}",
        ]
    if last.p_value < SIGNIFICANCE:
        return [f"straggler: none that matters; {often}, but {waited}, {last.share:.1%} of a step"]
    if chance_to_be_last(last.of, last.of, len(profile.records)) >= SIGNIFICANCE:
        return [f"straggler: too few steps to tell; {often}"]
    return [f"straggler: none; {often}, which may be chance"]


def _where_text(found: Straggler, names: Sequence[str]) -> str:
    lost = f"{ms(found.lost_ns)} ms"
    places = {
        "start": f"it began forward {lost} after the fastest rank",
        "forward": f"it lost {lost} before its first gradient",
        "backward": f"it lost {lost} before the gradient of {names[found.parameter or 0]}",
    }
    # A wait that no single place explains has many small causes: naming one of them would mislead.
    spread = f"it was slower throughout: it lost no more than {lost} in any one place"
    return places[found.where] if 2 * found.lost_ns >= found.wait_ns else spread


def clock_lines(profile: MergedProfile) -> list[str]:
    """How well the ranks' clocks agree, if they had to be aligned."""
    if len({record.clock_identity for record in profile.records}) == 1:
        return []
    worst_ns = max(clock.uncertainty_ns for clock in profile.clocks)
    return [f"clocks of different hosts aligned to within {worst_ns / 1e3:.0f} us: ignore shorter waits between them"]


def lost_lines(records: Iterable[RankRecord]) -> list[str]:
    """What was not recorded, by rank."""
    lines = []
    for record in records:
        parts = []
        if record.dropped:
            parts.append(f"{record.dropped} events of earlier steps were overwritten (profile(model, steps=N) keeps N)")
        if record.incomplete:
            parts.append(f"{record.incomplete} steps were only recorded in part and left out")
        if parts:
            lines.append(f"rank {record.rank}: {'; '.join(parts)}")
    return lines


# --- for JSON ---


def merged_dict(profile: MergedProfile, step: MergedStep) -> dict[str, Any]:
    """One step of all ranks. Times in us since the first rank began forward, on rank 0's clock."""
    zero_ns, names = min(rank.forward_begin_ns for rank in step.steps), profile.names
    last = profile.last_rank() if len(profile.records) > 1 else None
    last_rank = straggler = None
    if last is not None:
        last_rank = _in_us({name: value for name, value in vars(last).items() if not name.startswith("example")})
        if last.is_straggler:
            parameter = None if last.example.parameter is None else names[last.example.parameter]
            straggler = _in_us({**vars(last.example), "parameter": parameter})
    waits = [_in_us({"last_rank": b.last_rank, "late_ns": b.late_ns, "wait_ns": b.wait_ns}) for b in step.buckets]
    return {
        "verdict": verdict(profile, step),
        "step": step.index,
        "world_size": len(step.steps),
        "steps_recorded": len(profile.steps),
        "step_us": step.duration_ns / 1e3,
        "exposed_us": step.exposed_ns / 1e3,
        "overlap_ratio": step.overlap_ratio,
        "slowest_rank": profile.records[step.slowest].rank,
        "last_rank": last_rank,
        "straggler": straggler,
        "mean_wait_caused_us": [wait_ns / 1e3 for wait_ns in profile.mean_waits_ns()],
        "clock_uncertainty_us": [clock.uncertainty_ns / 1e3 for clock in profile.clocks],
        "events_dropped": [record.dropped for record in profile.records],
        "steps_incomplete": [record.incomplete for record in profile.records],
        "buckets": [{**_bucket_dict(b, names, zero_ns), **wait} for b, wait in zip(step.buckets, waits, strict=True)],
        "ranks": [
            {**_step_dict(rank_step, names, zero_ns), "traffic": traffic}
            for rank_step, traffic in zip(step.steps, traffic_dicts(profile.records), strict=True)
        ],
    }


def _step_dict(step: Step, names: Sequence[str], zero_ns: int) -> dict[str, Any]:
    times = ("forward_begin_ns", "backward_begin_ns", "compute_end_ns", "backward_end_ns")
    return {
        **_times_us(step, times, zero_ns),
        "exposed_us": step.exposed_ns / 1e3,
        "comm_us": step.comm_ns / 1e3,
        "overlap_ratio": step.overlap_ratio,
        "buckets": [_bucket_dict(bucket, names, zero_ns) for bucket in step.buckets],
    }


def _bucket_dict(bucket: BucketTimes, names: Sequence[str], zero_ns: int) -> dict[str, Any]:
    return {
        "bucket": bucket.index,
        "bytes": bucket.nbytes,
        "parameters": [names[param] for param in bucket.params],
        **_times_us(bucket, BUCKET_TIMES, zero_ns),
        "held_back_by": None if bucket.holder is None else names[bucket.holder],
        "queued_behind_bucket": bucket.behind,
    }


def _times_us(of: Step | BucketTimes, names: Sequence[str], zero_ns: int) -> dict[str, Any]:
    return _in_us({name: getattr(of, name) for name in names}, zero_ns)


def _in_us(values: Mapping[str, Any], zero_ns: int = 0) -> dict[str, Any]:
    """With those that end in `_ns` in us since `zero_ns`."""
    times = {f"{n[:-3]}_us": None if v is None else (v - zero_ns) / 1e3 for n, v in values.items() if n[-3:] == "_ns"}
    return {name: value for name, value in values.items() if name[-3:] != "_ns"} | times
