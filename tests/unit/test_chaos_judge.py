"""Developers' benchmarks: the judge of chaos, and the options and tasks of the cases `links` and `training`."""

import os
import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import hosts
from benchmarks.cases import CASES, training
from benchmarks.chaos import plan
from benchmarks.chaos.judge import COLUMNS, expect, judge
from benchmarks.chaos.outcome import Outcome, RankOutcome, RankReport, StepRecord
from benchmarks.chaos.plan import EXCEPTION, FULL, GLOO, KILL, KINDS, SHM, SLOW, STOP, TORCHFT, Trial, cells
from benchmarks.training.tasks import TASKS
from tests.unit.helpers import assert_refused
from torchddp.bench import cli, registry

FAULT_S = 100.0
TIMEOUT_S = 3.0
CULPRIT = 1


def trial_of(kind: str, over: str) -> Trial:
    phase = plan.CONSTRUCTION if kind == FULL else "forward"
    return Trial(0, kind, over, world_size=3, rank=CULPRIT, step=2, phase=phase)


def steps(count: int, deviation: float = 0.0) -> list[StepRecord]:
    """Steps of which the last deviates."""
    off = StepRecord(count - 1, "same", "same" if deviation == 0 else "other", deviation)
    return [*(StepRecord(step, "same", "same", 0.0) for step in range(count - 1)), off]


def outcome_of(trial: Trial) -> Outcome:
    """A correct outcome of the trial."""
    expected = expect(trial, TIMEOUT_S)
    ranks = []
    for rank in range(trial.world_size):
        report = RankReport(rank, transport="c10d" if trial.kind == FULL else "shm")
        raises = rank in expected.must_raise or (rank, trial.kind) == (CULPRIT, EXCEPTION)
        report.steps = steps(trial.step if raises else plan.STEPS)
        if raises:
            report.error_s = FAULT_S + 0.5
            report.error_types = ["TransportError", "RuntimeError"]
            report.error = f"TransportError: rank {rank}, step 3: rank {CULPRIT} died"
        elif trial.over == TORCHFT and trial.kind != SLOW:
            report.recovered_s = FAULT_S + 0.5
        ranks.append(RankOutcome(rank, report, exit_code=int(raises)))
    if trial.kind in (KILL, STOP):
        ranks[CULPRIT] = RankOutcome(CULPRIT, exit_code=-9)
    if trial.kind == FULL:
        ranks[0].stderr = f"memory can't be shared: rank {CULPRIT}: no room for gradients"
    return Outcome(trial, ranks, FAULT_S)


@pytest.mark.parametrize(("kind", "over"), cells(KINDS, plan.OVER))
def test_a_correct_outcome_passes(kind: str, over: str) -> None:
    verdict = judge(outcome_of(trial_of(kind, over)), TIMEOUT_S)
    assert verdict.ok, verdict.problems
    goes_on = kind in (SLOW, FULL) or (kind, over) == (plan.SOCKET, SHM)
    assert verdict.detection_s == (None if goes_on else 0.5)


Change = Callable[[Outcome], None]


def changed(**values: Any) -> Change:
    return lambda outcome: outcome.__dict__.update(values)


def rank_changed(rank: int, **values: Any) -> Change:
    return lambda outcome: outcome.ranks[rank].__dict__.update(values)


def report_changed(rank: int, **values: Any) -> Change:
    return lambda outcome: outcome.ranks[rank].report.__dict__.update(values)


ANOTHER = "TransportError: rank 0, step 3: rank 2 died after 1 s, bucket 1"
UNNAMED = "TransportError: timed out; ranks 0, 1 and 2 have waited 1 s"
# Changes to a correct outcome, with the column that then fails ("": none).
CHANGES = [
    ("detected", KILL, SHM, changed(fault_s=None)),
    ("detected", KILL, SHM, report_changed(2, error="", error_types=[], steps=steps(plan.STEPS))),
    ("detected", SLOW, SHM, report_changed(0, error=UNNAMED)),
    ("detected", KILL, TORCHFT, report_changed(2, recovered_s=None)),
    ("detected", EXCEPTION, TORCHFT, report_changed(2, error="RuntimeError: no quorum", error_s=FAULT_S)),
    ("", STOP, GLOO, report_changed(0, error_s=FAULT_S + TIMEOUT_S + 1.9)),
    ("in time", STOP, GLOO, report_changed(0, error_s=FAULT_S + TIMEOUT_S + 2.1)),
    ("named", KILL, SHM, report_changed(0, error=ANOTHER)),
    ("named", STOP, GLOO, report_changed(2, error=UNNAMED)),
    ("ended", KILL, SHM, rank_changed(2, hung="neither result nor error")),
    ("no leak", KILL, SHM, changed(leaks=["process 77 (python)"])),
    ("gradients", KILL, SHM, report_changed(2, steps=steps(2, 1e-8))),
    ("", KILL, GLOO, report_changed(0, steps=steps(2, 1e-6))),
    ("gradients", KILL, GLOO, report_changed(0, steps=steps(2, 1e-4))),
]


@pytest.mark.parametrize(("column", "kind", "over", "change"), CHANGES)
def test_a_wrong_outcome_fails_in_its_column(column: str, kind: str, over: str, change: Change) -> None:
    assert set(COLUMNS) <= {one[0] for one in CHANGES}
    outcome = outcome_of(trial_of(kind, over))
    change(outcome)
    assert list(judge(outcome, TIMEOUT_S).problems) == ([column] if column else [])


@pytest.fixture(autouse=True)
def own_cases():
    """The command adds the developers' cases to those that all tests of this process see."""
    with mock.patch.dict(registry.CASES):
        yield


def test_the_emulated_network_needs_root_ip_and_tc(monkeypatch, capsys) -> None:
    for user, missing, command, words in (
        (1000, "", [], "as root."),
        (0, "ip", [], "'ip' was not found"),
        (0, "", ["/nowhere/ip"], "Cannot build the emulated network: "),
        (0, "", ["sh", "-c", "echo Operation not permitted. >&2; exit 2"], "said: Operation not permitted."),
    ):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setattr(shutil, "which", {"ip": "/sbin/ip", "tc": "/sbin/tc", missing: None}.get)
        monkeypatch.setattr(hosts, "setup_commands", lambda found, rate, command=command: [command])
        assert_refused(main, ["--case", "links", "--set", "place=1gbit"], words, capsys)


def main(arguments: list[str]) -> int:
    return cli.main(arguments, CASES)


def test_a_wrong_option_of_a_case_is_refused_with_what_is_allowed(monkeypatch, capsys) -> None:
    for arguments, words in (
        ("links --set place=fast", "--set place: must be 'host', or a rate of 10mbit to 100gbit"),
        ("links --set speed=1", "--set speed=1: must be NAME=VALUE with an option of links: place."),
        ("step_time --set place=host", "with an option of step_time: none."),
        ("links --world-size 3", "--world-size must be even for the case links"),
        ("links --ours torch.nn.parallel.DistributedDataParallel", "--ours: the case links plans torchddp's"),
        ("training --set methods=magic", "--set methods: there is no 'magic'; choose from torch-ddp, "),
        ("training --set seeds=0", "--set seeds: must be a whole number from 1 to 20, not '0'."),
    ):
        assert_refused(main, ["--case", *arguments.split()], words, capsys)
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    assert_refused(main, ["--case", "training"], "The task digits needs scikit-learn", capsys)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_is_a_function_of_seed_step_and_rank(name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    task, again = TASKS[name](), TASKS[name]()
    inputs, targets = task.batch(3, 5, 1, 2)
    assert all(map(torch.equal, (inputs, targets), again.batch(3, 5, 1, 2)))
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 0)):
        assert not torch.equal(inputs, task.batch(*other, 2)[0]), other
    first, second = task.make_model(1), again.make_model(1)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    # Two ranks' parts of the evaluation set have equal sizes, are disjoint, and cover the set.
    (whole,), parts = task.held_out(0, 1), [task.held_out(rank, 2)[0] for rank in range(2)]
    assert len(parts[0][0]) == len(parts[1][0]) == len(whole[0]) / 2
    both = [first(*part).item() for part in parts]
    assert both[0] != both[1] and sum(both) / 2 == pytest.approx(first(*whole).item(), rel=1e-5)
