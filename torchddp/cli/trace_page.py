"""`torchddp trace` as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchddp.harness.machine import origin
from torchddp.harness.page import PagePlot, PageTable, Section, write_page
from torchddp.profiler.merge import MergedProfile, MergedStep
from torchddp.profiler.report import (
    FOOTNOTE,
    bucket_headings,
    bucket_rows,
    clock_lines,
    lost_lines,
    sent_lines,
    straggler_lines,
    summary_of,
)


def write_trace_page(
    path: Path, title: str, profile: MergedProfile, step: MergedStep, png: bytes, document: dict[str, Any]
) -> None:
    """The report, the picture, and the document behind them."""
    table = PageTable(bucket_headings(step), bucket_rows(step, profile.names))
    remarks = [*clock_lines(profile), *lost_lines(profile.records)]
    sections = [
        Section(
            "Where the time went",
            [*summary_of(step), *sent_lines(profile.records), *straggler_lines(profile, step), *remarks],
        ),
        Section("The step", [PagePlot(png, "Forward, backward and each bucket over time, one panel a rank")]),
        Section("Buckets", [table, FOOTNOTE]),
    ]
    write_page(path, title, sections, [line.plain for line in origin(document)], data=document)
