"""tests/gpu/run.sh without a GPU: dry runs, failed and interrupted steps, missing requirements, reports."""

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import environment, summary
from tests.gpu.device import DEVICE_ENV
from tests.gpu.test_two_ranks_nccl import LIBRARY_ENV
from tests.programs import ROOT
from tests.unit.helpers import wait_until

SCRIPT = ROOT / "tests" / "gpu" / "run.sh"
DRY = ["--dry-run", "--skip-build"]
# The command of a fake interpreter: every step succeeds at once.
NOTHING_TO_DO = r"*environment.py\ --cpu*|*-m\ pytest*|*-m\ benchmarks*) exit 0 ;; *--builds-cuda) exit 1 ;;"


def command_of(out: Path, *arguments: str, python: Path | str = sys.executable, **variables: str) -> dict[str, Any]:
    """The command for subprocess."""
    inherited = {name: value for name, value in os.environ.items() if name not in (DEVICE_ENV, LIBRARY_ENV)}
    env = {**inherited, "OUT": str(out), "PYTHON": str(python), "RUN_LIMIT_S": "10000", **variables}
    return {"args": [str(SCRIPT), *arguments], "env": env, "text": True}


def run_script(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command_of(*arguments, **options), capture_output=True, timeout=500)


def rows(output: str) -> dict[str, tuple[str, str]]:
    """Rows of the final table: step -> (outcome, note)."""
    found = re.findall(r"^(\w+) +(ok|FAILED|skipped) +\d+ s  ?(.*)$", output, re.MULTILINE)
    return {name: (outcome, note.strip()) for name, outcome, note in found}


def write_program(path: Path, text: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def fake_python(folder: Path, case: str) -> Path:
    """An interpreter that runs something else for some commands."""
    return write_program(folder / "python", f'case "$*" in\n{case}\nesac\nexec {sys.executable} "$@"')


@pytest.mark.thorough
def test_a_dry_run_runs_everything_that_needs_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = run_script(out, *DRY)
    table = rows(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.stem for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    benchmarks = {"benchmarks", "benchmarks_rows", "benchmarks_two_ranks"}
    assert table.keys() == files | benchmarks | {"environment", "memcheck", "racecheck"}
    for name in ("test_parity", "test_two_ranks_gloo"):
        outcome, note = table[name]
        assert outcome == "ok" and int(note.split()[0]) > 20, note
    assert table["memcheck"] == ("skipped", "dry run")
    assert done.stdout.rstrip().endswith(f"all ok, results in {out}")
    # Few enough files to copy one by one.
    names = sorted(path.name for path in out.iterdir())
    assert len(names) <= 8
    assert {"summary.txt", "environment.txt", "tests.xml", "bench.json", "logs.txt"} <= set(names)
    assert len([name for name in names if name.endswith(".png")]) == 1
    assert (out / "summary.txt").read_text() in done.stdout
    assert summary.counts(summary.suites_of(out / "tests.xml"))[0] > 40
    assert len(json.loads((out / "bench.json").read_text())["results"]) == 3  # one for each model
    rows_document = json.loads((out / "bench_rows.json").read_text())
    assert not rows_document["failures"]
    cases = {"gpu_pack", "gpu_scale", "gpu_host", "gpu_memory"}
    assert {result["case"] for result in rows_document["results"]} == cases


@pytest.mark.thorough
def test_a_failed_or_endless_step_is_shown_and_does_not_stop_the_next(tmp_path: Path) -> None:
    python = fake_python(
        tmp_path,
        '*pytest*test_parity*) cp "$OUT/summary.txt" "$OUT/before.txt"; echo "a broken pipe"; exit 3 ;; '
        "*pytest*test_streams*) sleep 1000 ;; *pytest*|*benchmarks*|*environment*) exit 0 ;;",
    )
    out = tmp_path / "results"
    done = run_script(out, *DRY, python=python, RUN_LIMIT_S="100")
    table = rows(done.stdout)
    assert done.returncode == 1
    assert table["test_parity"] == ("FAILED", "exit status 3")
    outcome, note = table["test_streams"]
    assert outcome == "FAILED" and re.match(r"stopped after \d+ s", note)
    assert table["test_two_ranks_nccl"][0] == "ok" and table["benchmarks"][0] == "ok"
    assert "something FAILED" in done.stdout.splitlines()[-1]
    assert "a broken pipe" in done.stdout and "a broken pipe" in (out / "logs.txt").read_text()
    # Results are written at once, whatever happens to the rest of the run.
    assert rows((out / "before.txt").read_text()).keys() == {"environment", "test_pack_gpu"}


def test_results_survive_an_external_stop(tmp_path: Path) -> None:
    python = fake_python(tmp_path, f'*pytest*test_parity*) echo "in the middle"; sleep 1000 ;; {NOTHING_TO_DO}')
    out = tmp_path / "results"
    running = out / "running.txt"

    def is_in_the_middle() -> bool:
        with contextlib.suppress(FileNotFoundError):  # also between two steps
            return "in the middle" in running.read_text()
        return False

    process = subprocess.Popen(**command_of(out, *DRY, python=python), stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert wait_until(is_in_the_middle)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=300)  # it ends although the step is still running
    finally:
        process.kill()
    assert process.returncode == 143 and "run.sh: interrupted after" in output
    assert rows((out / "summary.txt").read_text())["test_pack_gpu"][0] == "ok"
    assert "in the middle" in running.read_text()


@pytest.mark.parametrize("packed", [False, True])
def test_a_missing_package_or_library_skips_only_what_needs_it(tmp_path: Path, packed: bool) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "libnccl.so.2").write_bytes(b"\x7fELF" + os.urandom(2**21))
    library = "libnccl.so.2.xz" if packed else "libnccl.so.2"
    pack = "xz libnccl.so.2; " if packed else ""
    commands = f"{pack}split -b 1M -d {library} parts/{library}.part; sha256sum {library} >parts/{library}.sha256"
    subprocess.run(commands, shell=True, check=True, cwd=tmp_path)
    python = fake_python(
        tmp_path,
        rf"*environment.py\ --tool-path*) echo {tmp_path}; exit 0 ;; "
        r"*--lacks\ typer*) echo typer rich; exit 0 ;; *--lacks\ pytest_timeout) echo pytest_timeout; exit 0 ;; "
        rf'*-m\ pytest*test_two_ranks_nccl*) head -c 4 "${LIBRARY_ENV}" || echo "no library"; exit 3 ;; '
        + NOTHING_TO_DO,
    )
    write_program(tmp_path / "cmake", "exit 0")
    variables = {LIBRARY_ENV: str(parts), "RUN_LIMIT_S": "100000"}
    done = run_script(tmp_path / "results", "--dry-run", python=python, **variables)
    # Each step may use its share and what all before it left, but never more than 35 hundredths.
    limits = {name: int(s) for name, s in re.findall(r"^--- (\w+) \(at most (\d+) s\)", done.stdout, re.MULTILINE)}
    for name, most_s in {"environment": 3000, "configure": 6000, "build": 14000, "test_sharded": 35000}.items():
        assert most_s - 2000 <= limits[name] <= most_s, name
    table = rows(done.stdout)
    for name in ("benchmarks", "benchmarks_rows", "benchmarks_two_ranks"):
        assert table[name] == ("skipped", "no Python package typer, rich: put it on PYTHONPATH"), name
    assert table["test_parity"][0] == table["join_nccl"][0] == "ok" and "--timeout" not in done.stdout
    assert "ELF" in done.stdout and "no library" not in done.stdout
    (parts / f"{library}.part01").unlink()
    done = run_script(tmp_path / "results", *DRY, python=python, **{LIBRARY_ENV: str(parts)})
    assert rows(done.stdout)["join_nccl"][0] == "FAILED"
    assert "did NOT match" in done.stdout and "no library" in done.stdout


def test_time_shares_add_up_to_100_and_only_memcheck_ignores_failed_api_calls(tmp_path: Path) -> None:
    """The CUDA runtime and NCCL make driver calls that fail, which are not memory errors."""
    pattern = r"^(shares=\(\n.*?^\)).*^(check_memory\(\) \{.*?^\})"
    found = re.search(pattern, SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None and sum(map(int, re.findall(r" (\d+)\b", found[1]))) == 100
    write_program(tmp_path / "compute-sanitizer", 'echo "$@"')
    prelude = 'dry_run=false; pytest=(pytest); step() { shift; "$@"; }'
    commands = f"{prelude}\n{found[2]}\ncheck_memory memcheck; check_memory racecheck"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", commands], env=env, capture_output=True, text=True)
    memcheck, racecheck = done.stdout.splitlines()
    assert memcheck.startswith("--tool memcheck --error-exitcode 9 --report-api-errors no pytest -m not profiler ")
    assert racecheck.startswith("--tool racecheck --error-exitcode 9 pytest -m not profiler ")


def test_tool_versions_and_an_unsuitable_nvcc_are_reported(tmp_path, monkeypatch, capsys):
    for tool, says in {
        "cmake": "cmake version 4.4.4\n\nCMake suite maintained by Kitware",
        "ninja": "1.13.2",
        "c++": "",
        "nvcc": "nvcc: NVIDIA (R)\nCuda compilation tools, release 13.0, V13.0.88",
        "compute-sanitizer": "NVIDIA (R) Compute Sanitizer\nVersion 2025.3.1",
    }.items():
        write_program(tmp_path / tool, f"echo '{says}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDACXX", raising=False)
    environment.report()
    lines = capsys.readouterr().out.splitlines()
    versions = (
        "cmake version 4.4.4",
        "1.13.2",
        "nothing (exit code 0)",
        "Cuda compilation tools, release 13.0, V13.0.88",
    )
    found = zip(("cmake", "ninja", "c++", "nvcc", "sanitizer"), [*versions, "Version 2025.3.1"], strict=True)
    assert [f"{tool:<11} {version}" for tool, version in found] == lines[1:6]
    monkeypatch.setattr(environment, "find_items", lambda: collections.defaultdict(lambda: True))
    for torch_cuda, reason in (
        ("13.2", ""),
        ("14.0", "nvcc is CUDA 13.0, torch .* with CUDA 14.0: nvcc must be of CUDA 14.0 to 14.0"),
        ("12.9", "nvcc must be of CUDA 12.0 to 12.9"),
        (None, "was built without CUDA: it must be a CUDA build"),
    ):
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        assert environment.main(["--builds-cuda"]) == environment.main([]) == bool(reason), torch_cuda
        told = "This machine can't build the CUDA extension: " in (out := capsys.readouterr().out)
        assert told is bool(reason) and re.search(reason, out), torch_cuda
        assert environment.main(["--no-build"]) == 0, torch_cuda


@pytest.mark.parametrize(
    ("argument", "said"), [("--skip-build", "This machine lacks: CUDA device."), ("--fast", "run.sh [--dry-run]")]
)
def test_missing_requirements_and_unknown_arguments_fail_at_once(argument: str, said: str, tmp_path: Path) -> None:
    done = run_script(tmp_path / "results", argument, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and said in done.stdout
    assert "test_parity" not in done.stdout and "set -uo" not in done.stdout


REPORT = """<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">
<testcase classname="tests.gpu.test_x" name="test_a"/>
<testcase classname="tests.gpu.test_x" name="test_b"><failure message="not equal&#10;more">stack</failure></testcase>
<testcase classname="tests.gpu.test_x" name="test_c"><error message="">stack</error></testcase>
<testcase classname="tests.gpu.test_x" name="test_d"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


def test_reports_are_merged_and_failures_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "xml"
    folder.mkdir()
    (folder / "a.xml").write_text(REPORT)
    (folder / "b.xml").write_text(REPORT)
    (folder / "c.xml").write_text("<testsuites><tests")  # the process died while writing
    suites = summary.merge(folder, tmp_path / "all.xml")
    assert summary.counts(suites) == (2, 4, 2)
    assert summary.failures(suites)[:2] == ["test_x::test_b: not equal", "test_x::test_c: no reason given"]
    assert len(list(ET.parse(tmp_path / "all.xml").getroot().iter("testcase"))) == 8
    assert summary.main(["count", str(tmp_path / "none.xml")]) == 0
    assert capsys.readouterr().out == "no report: pytest died\n"
