"""A finding as text for a terminal and as JSON for programs."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

from torchddp.diagnose import stacks
from torchddp.diagnose.diagnosis import Finding
from torchddp.diagnose.rank_state import RankState
from torchddp.whole_file import write_whole

FOLDER_ENV = "TORCHDDP_HANG_REPORT_DIR"
_SHOWN_RANKS = 4


def text(finding: Finding, states: list[RankState], path: Path | None) -> str:
    """The headline, where the culprits are, what is waited for, and the file with everything else."""
    lines = [f"torchddp hang report: {finding.headline}"]
    by_rank = {state.rank: state for state in states}
    for culprit in finding.culprits[:_SHOWN_RANKS]:
        state = by_rank[culprit.rank]
        if state.who and state.answered:
            lines.append(f"  rank {culprit.rank}: process {state.who['pid']} on {state.who['host']}")
        lines += [f"    {frame}" for frame in stacks.user_part(state.stack)]
    if finding.culprits:
        lines.append(f"  what is waited for: {finding.waits_for}")
    if path is not None:
        lines.append(f"  all of it: {path}")
    return "\n".join(lines)


def as_json(finding: Finding, states: list[RankState], by: int) -> dict[str, Any]:
    """What the file holds. ``by``: the rank that has written it."""
    return {
        "headline": finding.headline,
        "step": finding.step,
        "culprits": [{"rank": culprit.rank, "why": culprit.why} for culprit in finding.culprits],
        "waiting": finding.waiting,
        "waited_s": finding.waited_s,
        "waits_for": finding.waits_for,
        "written_by": by,
        "time": time.time(),
        "ranks": [state.to_json() for state in states],
    }


def write(content: dict[str, Any]) -> Path | None:
    """Into TORCHDDP_HANG_REPORT_DIR, or else the system's temporary folder; None where that can't be written.

    For this user alone, and under a name that nobody can know before: it tells of the program and its exceptions.
    """
    folder = Path(os.environ.get(FOLDER_ENV) or tempfile.gettempdir())
    stamp = time.strftime("%Y%m%d-%H%M%S")
    where = f"rank{content['written_by']}-{os.getpid()}-step{content['step']}"
    path = folder / f"torchddp-hang-{stamp}-{where}-{secrets.token_hex(4)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1), mode=0o600)  # this process may be ended meanwhile
    except OSError:
        return None
    return path
