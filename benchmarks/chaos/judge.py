"""Decides whether a trial passed. Pure: takes an outcome and returns a verdict.

The requirements, by column:

* detected: every rank that depends on the faulty one raises a TransportError, after the fault and not before (with one
  of our hooks, a RuntimeError that quotes one; with one of torch's hooks, any error); if the job must continue (a slow
  rank, no shared memory), no rank raises anything.
* in time: within the bound for the kind of fault and the transport that carries the gradients.
* named: each error, or some rank's report, names the faulty rank.
* ended: every rank exits by itself: no hang, no crash.
* no leak: no process, segment, file or listening socket is left.
* gradients: each step that returned without an error has the simulation's gradients: bit for bit over shared memory,
  within `TOLERANCE` over a process group or through a hook.

Over torchft the others raise nothing: the fault is detected when they commit a step without the faulty replica.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos import plan
from benchmarks.chaos.outcome import Outcome, RankOutcome, RankReport
from benchmarks.chaos.plan import Trial

COLUMNS = ("detected", "in time", "named", "ended", "no leak", "gradients")
# Relative to the largest element: gloo sums in a different order.
TOLERANCE = 1e-5
# Seconds from the fault to the last error, by kind of fault and by the transport that carries the gradients.
BOUNDS_S = {
    (plan.KILL, plan.SHM): 2.0,
    (plan.KILL, plan.GLOO): 5.0,
    (plan.EXCEPTION, plan.SHM): 5.0,
    (plan.EXCEPTION, plan.GLOO): 5.0,
    (plan.SOCKET, plan.SHM): 5.0,
    (plan.SOCKET, plan.GLOO): 5.0,
    # Until the others' first step without it: the lighthouse waits for a heartbeat, then for replicas that may join.
    (plan.KILL, plan.TORCHFT): 10.0,
    (plan.EXCEPTION, plan.TORCHFT): 10.0,
}
STOP_MARGIN_S = 2.0  # beyond the timeout
_WAITED = re.compile(r"\branks? [\d, and-]+ (?:has|have) waited\b")
WARNING = re.compile(r"memory can't be shared|no room for")


@dataclass(frozen=True)
class Expectation:
    """The requirements on one trial."""

    must_raise: frozenset[int]
    may_raise: frozenset[int]  # a superset of must_raise; all other ranks must finish
    bound_s: float | None
    is_named: bool  # whether the faulty rank can be identified
    is_exact: bool


@dataclass
class Verdict:
    """The problems by column; empty if the trial passed."""

    trial: Trial
    problems: dict[str, str]
    detection_s: float | None  # from the fault to the last error

    @property
    def ok(self) -> bool:
        return not self.problems


def expect(trial: Trial, timeout_s: float) -> Expectation:
    """The requirements on this trial, given its group's timeout."""
    everyone = frozenset(range(trial.world_size))
    must_raise = may_raise = everyone
    if trial.over == plan.TORCHFT:
        must_raise = may_raise = frozenset()  # the others go on without it
    elif trial.kind in (plan.KILL, plan.STOP, plan.EXCEPTION):
        must_raise = everyone - {trial.rank}
    elif trial.kind == plan.SOCKET and trial.wire == plan.SHM:
        # No step needs these connections, but a rank that waits long checks them and takes a closed one for a death.
        must_raise = frozenset()
    elif trial.kind != plan.SOCKET:
        must_raise = may_raise = frozenset()
    bound_s = timeout_s + STOP_MARGIN_S if trial.kind == plan.STOP else BOUNDS_S.get((trial.kind, trial.wire))
    # Over gloo a rank sees a connection close, but not which rank closed it. A rank that waits for a stopped one has
    # time to find out, and a rank that raises tells the others.
    is_named = trial.kind == plan.FULL or (
        bool(must_raise) and (trial.wire == plan.SHM or trial.kind in (plan.STOP, plan.EXCEPTION))
    )
    is_exact = trial.wire == plan.SHM and trial.option != "own_hook"
    return Expectation(must_raise, may_raise, bound_s, is_named, is_exact)


def names_rank(text: str, rank: int) -> bool:
    """Whether the text names this rank ("rank 1", "ranks 1 and 2"), and not only to say that it has waited."""
    text = _WAITED.sub("", text)
    lists = re.findall(r"\branks? (\d+(?:(?:, | and |-)\d+)*)", text, re.IGNORECASE)
    for found in lists:
        for part in re.split(r", | and ", found):
            first, _, last = part.partition("-")
            if int(first) <= rank <= int(last or first):
                return True
    return False


def _is_culprit(trial: Trial, report: RankReport) -> bool:
    return trial.kind == plan.EXCEPTION and report.rank == trial.rank


def _is_transport_error(report: RankReport, option: str) -> bool:
    # Errors in hooks pass through torch's futures, which keep only their text.
    quotes_one = option == "own_hook" and "TransportError" in report.error
    return quotes_one or option == "torch_hook" or "TransportError" in report.error_types


def _detected(outcome: Outcome, expected: Expectation, reports: Sequence[RankReport]) -> str:
    if outcome.fault_s is None:
        return "the fault did not happen"
    for report in reports:
        if not report.error:
            if report.rank in expected.must_raise:
                return f"rank {report.rank} raised nothing"
        elif _is_culprit(outcome.trial, report):
            continue
        elif report.rank not in expected.may_raise:
            return f"rank {report.rank} raised {report.error}"
        elif report.error_s < outcome.fault_s:
            return f"rank {report.rank} raised before the fault: {report.error}"
        elif not _is_transport_error(report, outcome.trial.option):
            return f"rank {report.rank} raised no TransportError: {report.error}"
    if outcome.trial.over == plan.TORCHFT and outcome.trial.kind in (plan.KILL, plan.EXCEPTION):
        others = [report for report in reports if report.rank != outcome.trial.rank]
        if alone := next((report for report in others if report.recovered_s is None), None):
            return f"rank {alone.rank} committed no step without rank {outcome.trial.rank}"
    if outcome.trial.kind == plan.FULL:
        if any(report.transport != "c10d" for report in reports):
            return "a rank still uses shared memory"
        if not any(WARNING.search(rank.stderr) for rank in outcome.ranks):
            return "no rank warned"
    return ""


def _named(outcome: Outcome, expected: Expectation, reports: Sequence[RankReport]) -> str:
    culprit = outcome.trial.rank
    if other := [report.headline for report in outcome.hang_reports if culprit not in report.culprits]:
        return f"a hang report does not name rank {culprit}: {other[0]}"
    if outcome.hang_reports and not expected.may_raise:
        return f"a hang report although no rank hung: {outcome.hang_reports[0].headline}"
    if not expected.is_named or outcome.hang_reports:
        return ""
    if not expected.may_raise:
        warned = any(names_rank(rank.stderr, culprit) for rank in outcome.ranks)
        return "" if warned else f"no warning names rank {culprit}"
    silent = next((r for r in reports if r.error and r.rank != culprit and not names_rank(r.error, culprit)), None)
    return f"rank {silent.rank} does not name rank {culprit}: {silent.error}" if silent else ""


def _ended(outcome: Outcome, expected: Expectation, watched: Sequence[RankOutcome]) -> str:
    for rank in watched:
        if rank.hung:
            return f"rank {rank.rank}: {rank.hung}"
        if rank.report is None:
            return f"rank {rank.rank} ended without a report, exit code {rank.exit_code}"
        if rank.exit_code not in (0, 1):
            return f"rank {rank.rank} ended with exit code {rank.exit_code}"
    return ""


def _gradients(outcome: Outcome, expected: Expectation, reports: Sequence[RankReport]) -> str:
    for report in reports:
        # Over torchft, a healing replica copies the weights that a step produced instead of running the step.
        at_least = outcome.trial.step if report.error or outcome.trial.over == plan.TORCHFT else plan.STEPS
        if len(report.steps) < at_least and report.rank != outcome.trial.rank:
            return f"rank {report.rank} finished {len(report.steps)} steps of {at_least} before the fault"
        for step in report.steps:
            if expected.is_exact and step.digest != step.expected_digest:
                return f"rank {report.rank}, step {step.step}: bits differ from the simulation's ({step.deviation:.1e})"
            if not step.deviation <= TOLERANCE:
                return f"rank {report.rank}, step {step.step}: gradients are off by {step.deviation:.1e}"
    return ""


def judge(outcome: Outcome, timeout_s: float) -> Verdict:
    """The verdict on one trial."""
    trial = outcome.trial
    expected = expect(trial, timeout_s)
    # A killed or stopped rank sends no report.
    gone = {trial.rank} if trial.kind in (plan.KILL, plan.STOP) else set()
    watched = [rank for rank in outcome.ranks if rank.rank not in gone]
    reports = [rank.report for rank in watched if rank.report is not None]
    noticed_s = [r.error_s if r.error else r.recovered_s for r in reports if not _is_culprit(trial, r)]
    since_s = [
        noticed - outcome.fault_s for noticed in noticed_s if noticed is not None and outcome.fault_s is not None
    ]
    detection_s = max(since_s, default=None)
    is_late = detection_s is not None and expected.bound_s is not None and detection_s > expected.bound_s
    problems = {
        "detected": _detected(outcome, expected, reports),
        "in time": f"{detection_s:.1f} s, at most {expected.bound_s:g} s" if is_late else "",
        "named": _named(outcome, expected, reports),
        "ended": _ended(outcome, expected, watched),
        "no leak": "; ".join(outcome.leaks),
        "gradients": _gradients(outcome, expected, reports),
    }
    return Verdict(trial, {column: text for column, text in problems.items() if text}, detection_s)
