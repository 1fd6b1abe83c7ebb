"""tests/gpu/run.sh without a GPU: a dry run of all of it, and that failures are shown and stop nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from tests.gpu import environment, summary
from tests.gpu.device import DEVICE_ENV, chosen_device
from tests.gpu.ranks import lost_step

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"
DRY = ["--dry-run", "--skip-build"]


def run_script(
    out: Path, *arguments: str, python: Path | str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    extra = {"OUT": str(out), "PYTHON": str(python), **variables}
    inherited = {name: value for name, value in os.environ.items() if name != DEVICE_ENV}
    return subprocess.run(
        [str(SCRIPT), *arguments], env={**inherited, **extra}, capture_output=True, text=True, timeout=500
    )


def rows(output: str) -> dict[str, tuple[str, str]]:
    """Of the table at the end: step -> (outcome, note)."""
    found = re.findall(r"^(\w+) +(ok|FAILED|skipped) +\d+ s  ?(.*)$", output, re.MULTILINE)
    return {name: (outcome, note.strip()) for name, outcome, note in found}


def fake_python(folder: Path, case: str) -> Path:
    """An interpreter that does something else for some commands."""
    path = folder / "python"
    path.write_text(f'#!/usr/bin/env bash\ncase "$*" in\n{case}\nesac\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.timeout(500)
@pytest.mark.thorough
def test_a_dry_run_runs_everything_that_needs_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = run_script(out, *DRY)
    table = rows(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert table.keys() == files | {"environment", "memcheck", "racecheck", "benchmarks", "benchmarks_two_ranks"}
    for name in ("test_parity", "test_two_ranks_gloo"):
        outcome, note = table[name]
        assert outcome == "ok" and int(note.split()[0]) > 20, note
    assert table["memcheck"] == ("skipped", "dry run")
    assert done.stdout.rstrip().endswith(f"all ok, results in {out}")
    # Few enough files to be carried away one by one.
    names = sorted(path.name for path in out.iterdir())
    assert len(names) <= 8
    assert {"summary.txt", "environment.txt", "tests.xml", "bench.json", "logs.txt"} <= set(names)
    assert len([name for name in names if name.endswith(".png")]) == 1
    assert (out / "summary.txt").read_text() in done.stdout
    assert summary.counts(summary.suites_of(out / "tests.xml"))[0] > 40
    assert len(json.loads((out / "bench.json").read_text())["results"]) == 3  # a model each


@pytest.mark.thorough
def test_a_failed_step_is_shown_and_does_not_stop_the_next(tmp_path: Path) -> None:
    python = fake_python(
        tmp_path,
        '*pytest*test_parity*) cp "$OUT/summary.txt" "$OUT/before.txt"; echo "a broken pipe"; exit 3 ;; '
        "*pytest*|*benchmarks*) exit 0 ;;",
    )
    done = run_script(tmp_path / "results", *DRY, python=python)
    table = rows(done.stdout)
    assert done.returncode == 1
    assert table["test_parity"] == ("FAILED", "exit status 3")
    assert table["test_two_ranks_nccl"][0] == "ok" and table["benchmarks"][0] == "ok"
    assert "a broken pipe" in done.stdout
    assert "something FAILED" in done.stdout.splitlines()[-1]
    assert "a broken pipe" in (tmp_path / "results" / "logs.txt").read_text()
    # Results are there as soon as they are known, whatever becomes of the rest of the run.
    assert rows((tmp_path / "results" / "before.txt").read_text()).keys() == {"environment", "test_pack_gpu"}


@pytest.mark.thorough
def test_no_step_outlasts_the_run(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "*pytest*test_parity*) sleep 100 ;; *pytest*|*benchmarks*|*environment*) exit 0 ;;")
    done = run_script(tmp_path / "results", *DRY, python=python, RUN_LIMIT_S="40")
    table = rows(done.stdout)
    outcome, note = table["test_parity"]
    assert outcome == "FAILED" and re.match(r"stopped after \d+ s", note)
    assert done.returncode == 1 and table["benchmarks"][0] == "ok"


def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    done = run_script(tmp_path / "results", "--skip-build", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "This machine lacks: CUDA device." in done.stdout
    assert "test_parity" not in done.stdout


def test_an_unknown_argument_prints_how_to_use_it(tmp_path: Path) -> None:
    done = run_script(tmp_path / "results", "--fast")
    assert done.returncode == 2 and "--dry-run" in done.stdout and "set -uo" not in done.stdout


# --- its parts -------------------------------------------------------------------------------------------------------


def everything() -> dict[str, bool]:
    return dict.fromkeys(environment.look(), True)


def test_only_what_a_run_needs_is_missed() -> None:
    nothing = dict.fromkeys(everything(), False)
    assert environment.missing(everything(), on_gpu=True, builds=True) == []
    assert {"nvcc", "CUDA device", "cmake", "Python package torch"} <= set(
        environment.missing(nothing, on_gpu=True, builds=True)
    )
    assert not {"nvcc", "CUDA device", "cmake"} & set(environment.missing(nothing, on_gpu=False, builds=False))
    assert environment.missing({**everything(), "nvcc": False}, on_gpu=True, builds=False) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cmake version 4.4.4\n\nCMake suite maintained by Kitware", "cmake version 4.4.4"),
        (
            "nvcc: NVIDIA (R)\nCuda compilation tools, release 13.0, V13.0.88",
            "Cuda compilation tools, release 13.0, V13.0.88",
        ),
        ("NVIDIA (R) Compute Sanitizer\nVersion 2025.3.1", "Version 2025.3.1"),
        ("1.13.2\n", "1.13.2"),
        ("", ""),
    ],
)
def test_version_of_a_programs_answer(text: str, line: str) -> None:
    assert environment.version_line(text) == line


def test_tools_are_looked_for_beside_the_interpreter() -> None:
    folders = environment.tool_path()
    assert str(Path(sys.executable).parent) in folders
    assert all(Path(folder).is_dir() for folder in folders)


def test_the_build_is_for_the_gpu_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    assert environment.main(["--architecture"]) == 0
    assert capsys.readouterr().out == "103-real\n"


REPORT = """<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">
<testcase classname="tests.gpu.test_x" name="test_a"/>
<testcase classname="tests.gpu.test_x" name="test_b"><failure message="not equal&#10;more">stack</failure></testcase>
<testcase classname="tests.gpu.test_x" name="test_c"><error message="">stack</error></testcase>
<testcase classname="tests.gpu.test_x" name="test_d"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


def test_reports_are_merged_and_failures_named(tmp_path: Path) -> None:
    folder = tmp_path / "xml"
    folder.mkdir()
    (folder / "a.xml").write_text(REPORT)
    (folder / "b.xml").write_text(REPORT)
    (folder / "c.xml").write_text("<testsuites><tests")  # the process died while writing
    suites = summary.merge(folder, tmp_path / "all.xml")
    assert summary.counts(suites) == (2, 4, 2)
    assert summary.failures(suites)[:2] == ["test_x::test_b: not equal", "test_x::test_c: no reason given"]
    assert len(list(ET.parse(tmp_path / "all.xml").getroot().iter("testcase"))) == 8


def test_a_report_that_is_not_there_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary.main(["count", str(tmp_path / "none.xml")]) == 0
    assert capsys.readouterr().out == "no report: pytest died\n"
    assert summary.main([]) == 2


TRACEBACK = "Traceback (most recent call last):\n  File 'x', line 1, in f\n"


@pytest.mark.parametrize(
    ("errors", "lost"),
    [
        ([None, None], False),
        ([TRACEBACK + "AssertionError: rank 0", None], False),
        ([TRACEBACK + "AssertionError: rank 0", TRACEBACK + "AssertionError: rank 1"], False),
        ([TRACEBACK + "RuntimeError: no such type\nframe #0", TRACEBACK + "RuntimeError: no such type"], False),
        ([TRACEBACK + "RuntimeError: no memory", None], True),
        ([TRACEBACK + "RuntimeError: no memory", TRACEBACK + "torchddp._C.TransportError: lost"], True),
        ([TRACEBACK + "RuntimeError: no memory", TRACEBACK + "AssertionError: other"], True),
    ],
)
def test_ranks_are_lost_if_only_some_stopped(errors: list[str | None], lost: bool) -> None:
    assert lost_step(errors) is lost


def test_the_device_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_ENV, "cpu")
    assert chosen_device().type == "cpu"
    monkeypatch.delenv(DEVICE_ENV)
    assert str(chosen_device()) == "cuda:0"
    monkeypatch.setenv(DEVICE_ENV, "tpu")
    with pytest.raises(ValueError, match="must be cuda or cpu, got 'tpu'"):
        chosen_device()
