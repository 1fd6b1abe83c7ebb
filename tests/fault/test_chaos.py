"""Tests of the chaos suite: its trials pass, and deliberately wrong trials fail."""

from __future__ import annotations

import json
import multiprocessing
import sys

import pytest

from benchmarks.chaos import plan
from benchmarks.chaos.cli import main

pytestmark = pytest.mark.beyond_torch("names neither the rank nor the bucket")


@pytest.fixture
def chaos(tmp_path, capfd):
    """A function that runs the command in a fork, without repeating imports.

    It returns the exit code, the trials, and the output.
    """

    def run(*arguments: str) -> tuple[int, list[dict], str]:
        path = tmp_path / "chaos.json"
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=lambda: sys.exit(main(["--json", str(path), *arguments])))
        process.start()
        process.join(110)
        process.kill()
        said = capfd.readouterr().out
        assert path.exists(), f"exit code {process.exitcode}: {said}"
        return process.exitcode, json.loads(path.read_text())["results"], said

    return run


@pytest.mark.slow
def test_nine_trials(chaos):
    """Every kind except a slow rank, once over every transport."""
    kinds = ",".join(kind for kind in plan.KINDS if kind != plan.SLOW)
    code, rows, said = chaos("--trials", "9", "--kinds", kinds, "--over", "shm,gloo", "--seed", "3")
    assert code == 0 and all(row["passed"] for row in rows), said
    assert len({(row["kind"], row["over"]) for row in rows}) == 9


def test_deliberately_wrong_trials_fail(chaos):
    """A rank that trains wrong weights, and a rank that leaves a process behind."""
    kinds = f"{plan.CORRUPT},{plan.ORPHAN}"
    code, rows, said = chaos("--trials", "2", "--kinds", kinds, "--over", "shm", "--world-sizes", "2")
    assert code == 1
    corrupt, orphan = rows
    assert list(corrupt["problems"]) == ["gradients"], said
    assert list(orphan["problems"]) == ["no leak"] and "process" in orphan["problems"]["no leak"], said
    again = next(line for line in said.replace("\n", " ").split("failed: ")[1:] if "--only 1" in line)
    assert f"--seed 1 --kinds {kinds} --over shm --world-sizes 2 --only 1" in again


@pytest.mark.slow
def test_three_trials_over_torchft(chaos):
    pytest.importorskip("torchft")
    code, rows, said = chaos("--trials", "3", "--over", plan.TORCHFT)
    assert code == 0 and all(row["passed"] for row in rows), said
    assert {row["kind"] for row in rows} == {plan.KILL, plan.EXCEPTION, plan.SLOW}
