"""Finds out from the ranks' states which ranks hold up the others, and reports it as text and as a JSON file."""

from __future__ import annotations

import json
import math
import os
import secrets
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from torchddp.diagnose.rank_state import CallState, Frame, RankState, is_in_backward, ranks_text, user_part
from torchddp.errors import listed
from torchddp.transport.waits import GONE, STOPPED
from torchddp.whole_file import write_whole

FOLDER_ENV = "TORCHDDP_HANG_REPORT_DIR"
IN_HOOK = "the communication hook"  # as in csrc/reducer/reduce/comm_hook.cpp
_PLURALS = {"waits": "wait", "is": "are", "has": "have", "does": "do"}
_SHOWN_RANKS = 4
_SHOWN_NAMES = 3
# An exception explains a stall if it is not much older than the wait.
_EXCEPTION_SLACK_S = 5.0


@dataclass(frozen=True)
class Culprit:
    """A rank that others wait for, and why: 'has not produced ...; its backward is over: ...'."""

    rank: int
    why: str


@dataclass(frozen=True)
class Finding:
    """Why the ranks are stuck.

    ``step``: of the model; 0 without one. ``culprits``: the ranks that others wait for; none if all wait for each
    other. ``waited_s``: the longest wait of those ``waiting``. ``waits_for``: a bucket and step, or a call.
    """

    headline: str
    step: int
    culprits: list[Culprit]
    waiting: list[int]
    waited_s: float
    waits_for: str


def diagnose(states: list[RankState]) -> Finding:
    """Diagnose a stall from the states of all known ranks, at least one of which waits."""
    in_step = max((state.waited_s for state in states if state.waits), default=0.0)
    in_calls = max(state.longest_call_s for state in states)
    # If ranks have waited long in both, report the step: this mentions the calls of the ranks that hold it up.
    return _diagnose_step(states) if in_step > 0 and in_step >= in_calls / 2 else _diagnose_calls(states)


def _diagnose_calls(states: list[RankState]) -> Finding:
    calls = {state.rank: call for state in states if (call := state.call) is not None}
    awaited = {rank for call in calls.values() for rank in call.ranks or [state.rank for state in states]}
    concerned = [state for state in states if state.rank in calls or state.rank in awaited]
    waited_s = max(state.longest_call_s for state in states)
    doing = {state.rank: _doing(state, calls, waited_s) for state in concerned}
    absent = [state.rank for state in concerned if state.rank not in calls]
    culprits = absent or _in_rarer_calls(calls)
    held = [call for rank, call in calls.items() if rank not in culprits] or list(calls.values())
    by_text: dict[str, list[int]] = {}
    for rank in [*calls, *absent]:
        by_text.setdefault(doing[rank], []).append(rank)
    # Calls come first, of those the one with the fewest ranks.
    clauses = sorted(by_text.items(), key=lambda clause: len(clause[1]) if clause[1][0] in calls else math.inf)
    headline = ", ".join(f"{ranks_text(ranks)} {_agreeing(text, ranks)}" for text, ranks in clauses)
    if not culprits:
        headline += ": no rank is known to be missing: the network, or a rank's device?"
    headline += f"; the longest wait is {waited_s:.3g} s"
    step = max(state.step for state in states)
    found = [Culprit(rank, doing[rank]) for rank in culprits]
    return Finding(headline, step, found, list(calls), waited_s, str(held[0]))


def _in_rarer_calls(calls: dict[int, CallState]) -> list[int]:
    """The ranks in a different function, or on a different group, than most; all if there is no majority."""
    counts = Counter((call.function, call.group) for call in calls.values())
    if len(counts) == 1:
        return []
    most = max(counts.values())
    return [rank for rank, call in calls.items() if counts[call.function, call.group] < most] or list(calls)


def _doing(state: RankState, calls: dict[int, CallState], waited_s: float) -> str:
    if state.rank in calls:
        return f"waits in {calls[state.rank]}"
    if not state.answered:
        return _silent(state)
    if not state.stack:
        text = "is elsewhere: its training thread has ended"
    else:
        user = user_part(state.stack)
        text = f"is at {_place(user[-1])}" if user else "is elsewhere"
    return text + _exception(state, waited_s)


def _agreeing(text: str, ranks: list[int]) -> str:
    verb, _, rest = text.partition(" ")
    return text if len(ranks) == 1 else f"{_PLURALS[verb]} {rest}"


def _diagnose_step(states: list[RankState]) -> Finding:
    waiting = [state for state in states if state.waits]
    # The ranks that wait in the newest step have got furthest; of those, take the one that waits for the first bucket.
    model = max(waiting, key=lambda state: state.waited_s).model
    waiting = [state for state in waiting if state.model == model]
    members = waiting[0].members
    states = [state for state in states if not members or state.rank in members]
    front = max((state.step for state in waiting), default=0)
    fronts = [state for state in waiting if state.step == front]
    first = min(fronts, key=lambda state: (_is_in_hook(state), state.bucket < 0, state.bucket))
    culprits = [Culprit(state.rank, why) for state in states if (why := _why(state, first, states))]
    held = {culprit.rank for culprit in culprits}
    stuck = [state.rank for state in waiting if state.rank not in held] or [state.rank for state in waiting]
    longest_s = max(state.waited_s for state in waiting if state.rank in stuck)
    headline = _step_headline(culprits, stuck, longest_s, _waits_for(first))
    return Finding(headline, front, culprits, stuck, longest_s, _waits_for(first))


def _step_headline(culprits: list[Culprit], waiting: list[int], waited_s: float, waits_for: str) -> str:
    waits = f"{ranks_text(waiting)} {'has' if len(waiting) == 1 else 'have'} waited {waited_s:.3g} s"
    if not culprits:
        return f"{waits} for {waits_for}, and no rank is known to be missing: the network, or a rank's device?"
    shown = "; ".join(f"rank {culprit.rank} {culprit.why}" for culprit in culprits[:_SHOWN_RANKS])
    if len(culprits) > _SHOWN_RANKS:
        rest = [culprit.rank for culprit in culprits[_SHOWN_RANKS:]]
        shown += f"; {ranks_text(rest)} likewise hold{'s' if len(rest) == 1 else ''} up the others"
    return f"{shown}; {waits}"


def _waits_for(state: RankState) -> str:
    if state.bucket < 0:
        return f"{state.waits_for} (step {state.step})"
    return f"{state.waits_for} of bucket {state.bucket} of {state.num_buckets} (step {state.step})"


def _why(state: RankState, first: RankState, states: list[RankState]) -> str:
    """Why `first` waits for this rank; empty if it does not."""
    if not state.answered:
        return _silent(state)
    if state.model != first.model:
        return f"does not have this model: it was deleted, or never wrapped{_activity(state)}"
    if state.step != first.step:
        return _other_step(state, first, states)
    if _is_in_hook(state) and not _is_in_hook(first):
        return f"is in {_waits_for(state)}{_activity(state)}"
    if state.waits:
        same = (state.waits_for, state.bucket >= 0) == (first.waits_for, first.bucket >= 0)
        return "" if same or state.bucket >= 0 else f"waits for {_waits_for(state)} instead"
    return _same_step(state, first)


def _is_in_hook(state: RankState) -> bool:
    """Whether it runs its communication hook, which is in no call of torch.distributed now."""
    return state.waits and state.waits_for == IN_HOOK and state.training_call is None


def _silent(state: RankState) -> str:
    process = f" (process {state.who['pid']} on {state.who['host']})" if state.who else ""
    if state.left:
        return f"has left the training{process}: {state.left}"
    if state.alive == GONE:
        return f"is dead: its process is gone{process}"
    if state.alive == STOPPED:
        return f"is stopped, by a signal or a debugger{process}"
    busy = ": its Python threads don't run" if state.alive else ""
    return f"does not answer{busy}{process}"


def _other_step(state: RankState, first: RankState, states: list[RankState]) -> str:
    there = [other.rank for other in states if other.answered and other.step == first.step]
    finished = state.step < first.step and state.phase == "idle" and not state.waits
    are = "is" if len(there) == 1 else "are"
    text = f"{'has finished' if finished else 'is at'} step {state.step} ({ranks_text(there)} {are} at {first.step})"
    if state.waits:
        text += f" and waits there for {_waits_for(state)}"
    elif finished:
        text += ": it is late, has skipped a batch, or has none left"
    elif state.step < first.step:
        text += f", in {state.phase}: it is late, or has begun one batch fewer"
    else:
        text += ": it runs one more batch"
    return text + _exception(state, first.waited_s) + _activity(state)


def _same_step(state: RankState, first: RankState) -> str:
    if state.armed and state.missing:
        bucket = first.bucket if first.bucket in state.missing else min(state.missing)
        where = f"bucket {bucket} of {state.num_buckets}, step {state.step}"
        text = f"has not produced {listed(state.missing[bucket], _SHOWN_NAMES)} ({where})"
        if state.phase == "forward":
            text += "; its backward has produced none yet"
        elif state.stack and not is_in_backward(state.stack):
            every = listed([name for names in state.missing.values() for name in names], _SHOWN_NAMES)
            text += f"; its backward is over: it raised an error, or the loss does not depend on {every}"
        return text + _exception(state, first.waited_s) + _activity(state)
    if state.phase == "forward":
        return f"has not ended the forward of step {state.step}{_exception(state, first.waited_s)}{_activity(state)}"
    if state.phase == "backward":
        return f"has all gradients of step {state.step}, but has not finished reducing them{_activity(state)}"
    failed = f", which failed there: {_first_line(state.error)}" if state.error and state.phase == "idle" else ""
    if state.phase == "idle" and not failed:
        failed = ", as if all gradients were reduced"
        if first.bucket >= 0:
            failed += ": it may have skipped a backward, or run one under no_sync()"
    return f"has left step {state.step}{failed}{_exception(state, first.waited_s)}{_activity(state)}"


def _exception(state: RankState, waited_s: float) -> str:
    exception = state.exception
    if exception is None or exception["age_s"] > waited_s + _EXCEPTION_SLACK_S:
        return ""
    text = _first_line(f"{exception['type']}: {exception['message']}")
    return (
        f"; it is handling {text}" if exception["where"] == "handled" else f"; it left {exception['where']} with {text}"
    )


def _activity(state: RankState) -> str:
    if state.training_call is not None:
        return f"; it is in {state.training_call}"
    user = user_part(state.stack)
    return f"; it is at {_place(user[-1])}" if user else ""


def _place(frame: Frame) -> str:
    return f"{Path(frame.file).name}:{frame.line} in {frame.function}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def report_text(finding: Finding, states: list[RankState], path: Path | None) -> str:
    """The headline, where the culprits are, what the others wait for, and the file with everything else."""
    lines = [f"torchddp hang report: {finding.headline}"]
    by_rank = {state.rank: state for state in states}
    for culprit in finding.culprits[:_SHOWN_RANKS]:
        state = by_rank[culprit.rank]
        if state.who and state.answered:
            lines.append(f"  rank {culprit.rank}: process {state.who['pid']} on {state.who['host']}")
        lines += [f"    {frame}" for frame in user_part(state.stack)]
    if finding.culprits:
        lines.append(f"  waiting for: {finding.waits_for}")
    if path is not None:
        lines.append(f"  full report: {path}")
    return "\n".join(lines)


def write_report(finding: Finding, states: list[RankState], by: int) -> Path | None:
    """Write to TORCHDDP_HANG_REPORT_DIR, or else to the system's temporary folder; None if that can't be written.

    Readable by this user only, under a name that can't be guessed: it reveals details of the program.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    where = f"rank{by}-{os.getpid()}-step{finding.step}"
    ranks = [asdict(state) for state in states]
    content = {**asdict(finding), "written_by": by, "time": time.time(), "ranks": ranks}
    try:
        folder = Path(os.environ.get(FOLDER_ENV) or tempfile.gettempdir())  # which looks for one that can be written
        path = folder / f"torchddp-hang-{stamp}-{where}-{secrets.token_hex(4)}.json"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1), mode=0o600)  # atomic, since this process may be killed now
    except OSError:
        return None
    return path
