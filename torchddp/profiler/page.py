"""The page of a trace: one HTML file with all steps, a lane per rank, and nothing from elsewhere.

Python makes all text, with the functions of the text report; the script only draws the spans and swaps steps.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchddp.profiler import report
from torchddp.profiler.export import COLORS, row_names
from torchddp.profiler.numbers import TERMS, profile_numbers, spans, step_numbers
from torchddp.profiler.ranks import MergedProfile

_TEMPLATE = Path(__file__).with_name("page.html")
_KINDS = tuple(COLORS)


def page(title: str, verdict: str, runs: Sequence[tuple[str, MergedProfile]], origin: Iterable[str]) -> str:
    """`runs`: the name and the profile of each, shown side by side."""
    found = [(name, profile, profile_numbers(profile)) for name, profile in runs]
    parts = {
        "TITLE": html.escape(title),
        "VERDICT": html.escape(verdict),
        "KEY": "".join(
            f'<span><i style="background:var(--{what.replace(" ", "-")})"></i>{what}</span>' for what in COLORS
        ),
        "RUNS": "".join(_run(name, numbers) for name, _, numbers in found),
        "TERMS": "".join(f"<dt>{word}</dt><dd>{html.escape(meaning)}</dd>" for word, meaning in TERMS.items()),
        "ORIGIN": "<br>".join(map(html.escape, origin)),
        # No text may end the script element.
        "DATA": json.dumps([_data(profile, numbers) for _, profile, numbers in found], separators=(",", ":")).replace(
            "</", "<\\/"
        ),
    }
    return re.sub("@([A-Z]+)@", lambda found: parts[found[1]], _TEMPLATE.read_text())


def _run(name: str, found: Mapping[str, Any]) -> str:
    """The part that holds without the script: the median step's numbers and table."""

    def lines(texts: Iterable[str]) -> str:
        return "".join(f"<div>{html.escape(text)}</div>" for text in texts)

    def row(tag: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = "".join(row("td", cells) for cells in report.bucket_rows(found))
    heading = f"<h2>{html.escape(name)}</h2>" if name else ""
    return f"""<section class="run">{heading}
<h2 class="title">{html.escape(report.title(found))}</h2>
<div class="headline">{lines(report.headline(found))}</div>
<div class="strip" aria-hidden="true"></div>
<input type="range" class="range" min="0" value="0" aria-label="step">
<div class="lanes"></div>
<p class="detail" aria-live="polite"></p>
<div class="table" tabindex="0" role="region" aria-label="buckets"><table>
<thead>{row("th", report.columns(found))}</thead><tbody class="rows">{rows}</tbody></table></div>
<p class="dim">{report.UNITS}</p>
<div class="notes">{lines(report.notes(found))}</div></section>"""


def _data(profile: MergedProfile, found: Mapping[str, Any]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    for step in profile.steps:
        numbers = step_numbers(profile, step)
        each = [[(r, _KINDS.index(w), round(a, 1), round(b, 1)) for r, w, a, b in spans(k)] for k in numbers["ranks"]]
        steps.append(
            {
                "step": step.index,
                "title": report.title(found) if step.index == found["step"] else f"Step {step.index}",
                "slowest_rank": numbers["slowest_rank"],
                "headline": report.headline(numbers),
                "rows": report.bucket_rows(numbers),
                "exposed_us": round(numbers["exposed_us"], 1),
                "end_us": round(max(rank["backward_end_us"] for rank in numbers["ranks"]), 1),
                "spans": each,
            }
        )
    rows, ranks = row_names(found["buckets"]), [rank["rank"] for rank in found["ranks"]]
    median = [step.index for step in profile.steps].index(found["step"])
    return {"kinds": _KINDS, "rows": rows, "ranks": ranks, "median": median, "steps": steps}
