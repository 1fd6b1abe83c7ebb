"""What a person reads of a profile, and the same as a dict for JSON. Text of at most 80 columns."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchddp.harness.tables import number, plain_table, ranks_text
from torchddp.profiler.ranks import (
    Clock,
    MergedBucket,
    MergedProfile,
    MergedStep,
    RankRecord,
    merge,
    traffic_dicts,
)
from torchddp.profiler.steps import BUCKET_TIMES, BucketTimes, Step
from torchddp.traffic import text_of, total_wire_bytes

WIDTH = 80
FOOTNOTE = (
    "Times in ms from the begin of backward. done: as seen by the thread that waits for one bucket after the other, so "
    "an upper bound."
)


def as_text(renderable: RenderableType) -> str:
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def ms(time_ns: float) -> str:
    return number(time_ns / 1e6)


def rank_report(record: RankRecord) -> RenderableType:
    """The median step of one rank. Raises ValueError if it has no complete step."""
    if not record.steps:
        raise ValueError("no complete step was recorded: run forward and backward inside the profile")
    profile = merge([record], [Clock()])
    return _report(profile, f" of rank {record.rank}, the median of {len(record.steps)}")


def merged_report(profile: MergedProfile) -> RenderableType:
    """The median step of all ranks, and who held the others up."""
    return _report(profile, f", the median of {len(profile.steps)}, {ranks_text(len(profile.records))}")


def _report(profile: MergedProfile, title: str) -> RenderableType:
    step = profile.median_step()
    table = bucket_table(step, profile.names, f"Step {step.index}{title}")
    return Group(table, "", *map(Text, lines_of(profile, step)), Text(FOOTNOTE, style="dim"))


def lines_of(profile: MergedProfile, step: MergedStep) -> list[str]:
    """All that is said beside the table."""
    return [
        *summary_of(step),
        *sent_lines(profile.records),
        *straggler_lines(profile, step),
        *clock_lines(profile),
        *lost_lines(profile.records),
    ]


def bucket_table(step: MergedStep, names: Sequence[str], title: str) -> Table:
    last_rank = ["last\nrank"] if len(step.steps) > 1 else []
    columns = ("MB", "first\nready", "last\nready", "packed", "launched", "done", *last_rank)
    table = plain_table(title, "bucket", *columns)
    table.columns[0].justify = "right"
    table.add_column("held back by", overflow="fold")
    for row in bucket_rows(step, names):
        table.add_row(*map(Text, row))  # names are no markup
    return table


def bucket_rows(step: MergedStep, names: Sequence[str]) -> list[list[str]]:
    """The cells of the table: times in ms from the first rank's begin of backward."""
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
    """The parameter, or the bucket it queued behind, or that it was skipped."""
    if bucket.last_rank is None:
        return "(skipped: unused)"
    if bucket.behind is not None:
        return f"bucket {bucket.behind}"
    return "" if bucket.holder is None else names[bucket.holder]


def summary_of(step: MergedStep) -> list[str]:
    """Where the step's time went, of the slowest rank in each."""
    forward_ns = max(rank.backward_begin_ns - rank.forward_begin_ns for rank in step.steps)
    backward_ns = max(rank.compute_end_ns - rank.backward_begin_ns for rank in step.steps)
    comm_ns = max(rank.comm_ns for rank in step.steps)
    return [
        f"step {ms(step.duration_ns)} ms: forward {ms(forward_ns)}, backward {ms(backward_ns)}, then exposed "
        f"{ms(step.exposed_ns)}",
        f"communication {ms(comm_ns)} ms, overlap ratio {step.overlap_ratio:.2f} (its share before the last gradient)",
    ]


def sent_lines(records: Sequence[RankRecord]) -> list[str]:
    """Bytes of a step (the last that was seen), of the rank that put most on the wire."""
    most = max(records, key=lambda record: total_wire_bytes(record.traffic) or 0)
    of_rank = f", by rank {most.rank}" if any(record.traffic != most.traffic for record in records) else ""
    return [f"sent per step{of_rank}: {text_of(most.traffic)}"]


def straggler_lines(profile: MergedProfile, step: MergedStep) -> list[str]:
    if len(profile.records) == 1:
        return []
    return [_straggler_line(step, profile.names), *_usual_straggler(profile)]


def _straggler_line(step: MergedStep, names: Sequence[str]) -> str:
    found = step.straggler
    if found is None:
        return "straggler: none, no rank waited for another in this step"
    lost = f"{ms(found.lost_ns)} ms"
    places = {
        "start": f"it began forward {lost} after the fastest rank",
        "forward": f"it lost {lost} before its first gradient",
        "backward": f"it lost {lost} before the gradient of {names[found.parameter or 0]}",
    }
    # A wait that no single place explains has many small causes: naming one of them would mislead.
    spread = f"it was slower all along, by at most {lost} at once"
    why = places[found.where] if 2 * found.lost_ns >= found.wait_ns else spread
    return f"straggler: rank {found.rank} kept each other rank waiting {ms(found.wait_ns)} ms; {why}"


def _usual_straggler(profile: MergedProfile) -> Iterable[str]:
    means = profile.mean_waits_ns()
    worst = max(range(len(means)), key=means.__getitem__)
    often = sum(s.straggler is not None and s.straggler.rank == worst for s in profile.steps)
    each_ns = means[worst] / (len(means) - 1)
    if often:
        yield (
            f"over {len(profile.steps)} steps: rank {worst} kept each other rank waiting {ms(each_ns)} ms a step, "
            f"and was the straggler in {often}"
        )


def clock_lines(profile: MergedProfile) -> list[str]:
    """How well the ranks' clocks agree, if they had to be aligned."""
    if len({record.clock_identity for record in profile.records}) == 1:
        return []
    worst_ns = max(clock.uncertainty_ns for clock in profile.clocks)
    return [
        f"clocks of different hosts aligned to within {worst_ns / 1e3:.0f} us: shorter waits between them say nothing"
    ]


def lost_lines(records: Iterable[RankRecord]) -> list[str]:
    """What was not seen, by rank."""
    lines = []
    for record in records:
        parts = []
        if record.dropped:
            parts.append(f"{record.dropped} events of earlier steps were overwritten (profile(model, steps=N) keeps N)")
        if record.incomplete:
            parts.append(f"{record.incomplete} steps were only seen in part and left out")
        if parts:
            lines.append(f"rank {record.rank}: {'; '.join(parts)}")
    return lines


# --- for JSON ---


def merged_dict(profile: MergedProfile, step: MergedStep) -> dict[str, Any]:
    """One step of all ranks. Times in us from the first rank's begin of forward, on rank 0's clock."""
    zero_ns = min(rank.forward_begin_ns for rank in step.steps)
    found = step.straggler
    return {
        "step": step.index,
        "world_size": len(step.steps),
        "steps_recorded": len(profile.steps),
        "step_us": step.duration_ns / 1e3,
        "exposed_us": step.exposed_ns / 1e3,
        "overlap_ratio": step.overlap_ratio,
        "straggler": None
        if found is None
        else {
            "rank": found.rank,
            "wait_us": found.wait_ns / 1e3,
            "total_wait_us": found.total_wait_ns / 1e3,
            "where": found.where,
            "parameter": None if found.parameter is None else profile.names[found.parameter],
            "lost_us": found.lost_ns / 1e3,
        },
        "mean_wait_caused_us": [wait_ns / 1e3 for wait_ns in profile.mean_waits_ns()],
        "clock_uncertainty_us": [clock.uncertainty_ns / 1e3 for clock in profile.clocks],
        "events_dropped": [record.dropped for record in profile.records],
        "steps_incomplete": [record.incomplete for record in profile.records],
        "buckets": [
            {
                **_bucket_dict(bucket, profile.names, zero_ns),
                "last_rank": bucket.last_rank,
                "late_us": bucket.late_ns / 1e3,
                "wait_us": bucket.wait_ns / 1e3,
            }
            for bucket in step.buckets
        ],
        "ranks": [
            {**_step_dict(rank_step, profile.names, zero_ns), "traffic": traffic}
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


def _times_us(of: Step | BucketTimes, names: Sequence[str], zero_ns: int) -> dict[str, float | None]:
    times = {name.removesuffix("_ns"): getattr(of, name) for name in names}
    return {f"{name}_us": None if time_ns is None else (time_ns - zero_ns) / 1e3 for name, time_ns in times.items()}
