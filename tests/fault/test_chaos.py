"""The chaos suite itself: its trials pass, and trials that are wrong on purpose fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import plan
from benchmarks.chaos.cli import main

pytestmark = pytest.mark.beyond_torch("names neither the rank nor the bucket")


def run_command(arguments, output):
    """In a fork, which need not import anything."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)


def chaos(folder: Path, *arguments: str) -> tuple[int, list[dict], str]:
    """(exit code, the trials, what was printed) of the command."""
    path, output = folder / "chaos.json", folder / "output"
    command = ["--json", str(path), *arguments]
    process = multiprocessing.get_context("fork").Process(target=run_command, args=(command, output))
    process.start()
    process.join(110)
    if process.exitcode is None:
        process.kill()
    said = output.read_text()
    assert path.exists(), f"exit code {process.exitcode}: {said}"
    return process.exitcode, json.loads(path.read_text())["results"], said


def assert_passed(folder: Path, *arguments: str) -> list[dict]:
    code, rows, said = chaos(folder, *arguments)
    assert code == 0 and all(row["passed"] for row in rows), said
    return rows


@pytest.mark.slow
def test_nine_trials(tmp_path):
    """Every kind but a slow rank, over every transport once."""
    kinds = ",".join(kind for kind in plan.KINDS if kind != plan.SLOW)
    rows = assert_passed(tmp_path, "--trials", "9", "--kinds", kinds, "--over", "shm,gloo", "--seed", "3")
    assert len({(row["kind"], row["over"]) for row in rows}) == 9


def test_trials_that_are_wrong_on_purpose_fail(tmp_path):
    """A rank that trains other weights than it should, and one that leaves a process behind."""
    kinds = f"{plan.CORRUPT},{plan.ORPHAN}"
    code, rows, said = chaos(tmp_path, "--trials", "2", "--kinds", kinds, "--over", "shm", "--world-sizes", "2")
    assert code == 1
    corrupt, orphan = rows
    assert list(corrupt["problems"]) == ["gradients"], said
    assert list(orphan["problems"]) == ["no leak"] and "process" in orphan["problems"]["no leak"], said
    again = next(line for line in said.replace("\n", " ").split("failed: ")[1:] if "--only 1" in line)
    assert f"--seed 1 --kinds {kinds} --over shm --world-sizes 2 --only 1" in again


@pytest.mark.slow
def test_three_trials_over_torchft(tmp_path):
    pytest.importorskip("torchft")
    rows = assert_passed(tmp_path, "--trials", "3", "--over", plan.TORCHFT)
    assert {row["kind"] for row in rows} == {plan.KILL, plan.EXCEPTION, plan.SLOW}
