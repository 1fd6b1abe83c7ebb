"""tests/gpu/run.sh without a GPU: a dry run of all of it, and that failures are shown and stop nothing."""

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

from scripts.gpu_dry_run import copy_checkout
from tests.gpu import environment, summary
from tests.gpu.device import DEVICE_ENV, chosen_device
from tests.gpu.ranks import lost_step
from tests.gpu.test_two_ranks_nccl import LIBRARY_ENV
from tests.unit.helpers import wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"
DRY = ["--dry-run", "--skip-build"]
# For a fake interpreter: every step succeeds at once.
NOTHING_TO_DO = r"*environment.py\ --cpu*|*-m\ pytest*|*benchmarks.gpu*) exit 0 ;; *--builds-cuda) exit 1 ;;"


def command_of(out: Path, *arguments: str, python: Path | str = sys.executable, **variables: str) -> dict[str, Any]:
    """What subprocess is to start."""
    inherited = {name: value for name, value in os.environ.items() if name not in (DEVICE_ENV, LIBRARY_ENV)}
    env = {**inherited, "OUT": str(out), "PYTHON": str(python), **variables}
    return {"args": [str(SCRIPT), *arguments], "env": env, "text": True}


def run_script(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command_of(*arguments, **options), capture_output=True, timeout=500)


def rows(output: str) -> dict[str, tuple[str, str]]:
    """Of the table at the end: step -> (outcome, note)."""
    found = re.findall(r"^(\w+) +(ok|FAILED|skipped) +\d+ s  ?(.*)$", output, re.MULTILINE)
    return {name: (outcome, note.strip()) for name, outcome, note in found}


def write_program(path: Path, text: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


def fake_python(folder: Path, case: str) -> Path:
    """An interpreter that does something else for some commands."""
    return write_program(folder / "python", f'case "$*" in\n{case}\nesac\nexec {sys.executable} "$@"')


@pytest.mark.timeout(500)
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
    # Few enough files to be carried away one by one.
    names = sorted(path.name for path in out.iterdir())
    assert len(names) <= 8
    assert {"summary.txt", "environment.txt", "tests.xml", "bench.json", "logs.txt"} <= set(names)
    assert len([name for name in names if name.endswith(".png")]) == 1
    assert (out / "summary.txt").read_text() in done.stdout
    assert summary.counts(summary.suites_of(out / "tests.xml"))[0] > 40
    assert len(json.loads((out / "bench.json").read_text())["results"]) == 3  # a model each
    rows_document = json.loads((out / "bench_rows.json").read_text())
    assert not rows_document["failures"]
    cases = {"gpu_pack", "gpu_scale", "gpu_host", "gpu_options", "gpu_memory", "gpu_leave"}
    assert {result["case"] for result in rows_document["results"]} == cases


@pytest.mark.thorough
def test_a_failed_or_endless_step_is_shown_and_does_not_stop_the_next(tmp_path: Path) -> None:
    python = fake_python(
        tmp_path,
        '*pytest*test_parity*) cp "$OUT/summary.txt" "$OUT/before.txt"; echo "a broken pipe"; exit 3 ;; '
        "*pytest*test_streams*) sleep 100 ;; *pytest*|*benchmarks*|*environment*) exit 0 ;;",
    )
    out = tmp_path / "results"
    done = run_script(out, *DRY, python=python, RUN_LIMIT_S="40")
    table = rows(done.stdout)
    assert done.returncode == 1
    assert table["test_parity"] == ("FAILED", "exit status 3")
    outcome, note = table["test_streams"]
    assert outcome == "FAILED" and re.match(r"stopped after \d+ s", note)
    assert table["test_two_ranks_nccl"][0] == "ok" and table["benchmarks"][0] == "ok"
    assert "something FAILED" in done.stdout.splitlines()[-1]
    assert "a broken pipe" in done.stdout and "a broken pipe" in (out / "logs.txt").read_text()
    # Results are there as soon as they are known, whatever becomes of the rest of the run.
    assert rows((out / "before.txt").read_text()).keys() == {"environment", "test_pack_gpu"}


def test_each_step_has_a_share_of_its_own_and_what_others_left(tmp_path: Path) -> None:
    write_program(tmp_path / "cmake", "exit 0")
    python = fake_python(tmp_path, rf"*environment.py\ --tool-path*) echo {tmp_path}; exit 0 ;; {NOTHING_TO_DO}")
    done = run_script(tmp_path / "results", "--dry-run", python=python, RUN_LIMIT_S="10000")
    limits = re.findall(r"^--- (\w+) \(at most (\d+) s\)", done.stdout, re.MULTILINE)
    given = {name: int(seconds) for name, seconds in limits}
    assert done.returncode == 0, done.stdout + done.stderr
    # The end of its own share and of all before it, nothing of which was used; never more than 35 hundredths.
    assert 1200 - 200 <= given["configure"] <= 1200 and 3000 - 200 <= given["build"] <= 3000
    assert given["benchmarks_two_ranks"] == 3500
    assert f"--parallel {len(os.sched_getaffinity(0))}\n" in done.stdout  # though the script sets OMP_NUM_THREADS
    shares = re.search(r"^shares=\((.*?)^\)", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert shares and sum(map(int, re.findall(r" (\d+)\b", shares[1]))) == 100


def test_what_is_known_survives_a_stop_from_outside(tmp_path: Path) -> None:
    python = fake_python(tmp_path, f'*pytest*test_parity*) echo "in the middle"; sleep 100 ;; {NOTHING_TO_DO}')
    out = tmp_path / "results"
    running = out / "running.txt"
    process = subprocess.Popen(**command_of(out, *DRY, python=python), stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert wait_until(lambda: running.is_file() and "in the middle" in running.read_text(), 60)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)  # ends though the step would go on
    finally:
        process.kill()
    assert process.returncode == 143 and "stopped from outside" in output
    assert rows((out / "summary.txt").read_text())["test_pack_gpu"][0] == "ok"
    assert "in the middle" in running.read_text()


@pytest.mark.parametrize("packed", [False, True])
def test_without_a_package_or_a_part_of_a_library_only_what_needs_it_is_left_out(tmp_path: Path, packed: bool) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "libnccl.so.2").write_bytes(b"\x7fELF" + os.urandom(2**21))
    library = "libnccl.so.2.xz" if packed else "libnccl.so.2"
    pack = "xz libnccl.so.2; " if packed else ""
    commands = f"{pack}split -b 1M -d {library} parts/{library}.part; sha256sum {library} >parts/{library}.sha256"
    subprocess.run(commands, shell=True, check=True, cwd=tmp_path)
    python = fake_python(
        tmp_path,
        r"*--lacks\ typer*) echo typer rich; exit 0 ;; *--lacks\ pytest_timeout) echo pytest_timeout; exit 0 ;; "
        rf'*-m\ pytest*test_two_ranks_nccl*) head -c 4 "${LIBRARY_ENV}" || echo "no library"; exit 3 ;; '
        + NOTHING_TO_DO,
    )
    done = run_script(tmp_path / "results", *DRY, python=python, **{LIBRARY_ENV: str(parts)})
    table = rows(done.stdout)
    for name in ("benchmarks", "benchmarks_rows", "benchmarks_two_ranks"):
        assert table[name] == ("skipped", "no Python package typer, rich: put it on PYTHONPATH")
    assert table["test_parity"][0] == table["join_nccl"][0] == "ok" and "--timeout" not in done.stdout
    assert "ELF" in done.stdout and "no library" not in done.stdout
    (parts / f"{library}.part01").unlink()
    done = run_script(tmp_path / "results", *DRY, python=python, **{LIBRARY_ENV: str(parts)})
    assert rows(done.stdout)["join_nccl"][0] == "FAILED"
    assert "did NOT match" in done.stdout and "no library" in done.stdout


@pytest.mark.parametrize(
    ("argument", "said"), [("--skip-build", "This machine lacks: CUDA device."), ("--fast", "run.sh [--dry-run]")]
)
def test_what_is_missing_or_unknown_is_told_at_once(argument: str, said: str, tmp_path: Path) -> None:
    done = run_script(tmp_path / "results", argument, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and said in done.stdout
    assert "test_parity" not in done.stdout and "set -uo" not in done.stdout


# --- its parts -------------------------------------------------------------------------------------------------------


def test_only_what_a_run_needs_is_missed() -> None:
    there = dict.fromkeys(environment.look(), True)
    nothing = dict.fromkeys(there, False)
    assert environment.missing(there, on_gpu=True, builds=True) == []
    for_gpus = {"nvcc", "CUDA device", "cmake"}
    assert for_gpus | {"Python package torch"} <= set(environment.missing(nothing, on_gpu=True, builds=True))
    assert not for_gpus & set(environment.missing(nothing, on_gpu=False, builds=False))
    assert environment.missing({**there, "nvcc": False}, on_gpu=True, builds=False) == []


@pytest.mark.parametrize(
    ("compiler", "torch_cuda", "reason"),
    [
        ("13.0", "13.0", ""),
        ("13.0", "13.2", ""),
        ("13.9", "13.10", ""),
        ("13.1", "13.0", r"nvcc is CUDA 13.1, torch .* with CUDA 13.0: nvcc must be of CUDA 13.0 to 13.0"),
        ("12.8", "13.1", r"nvcc is CUDA 12.8, torch .* with CUDA 13.1: nvcc must be of CUDA 13.0 to 13.1"),
        ("13.0", None, "was built without CUDA: it must be a CUDA build"),
        ("", "13.0", "nvcc --version' does not tell its CUDA"),
    ],
)
def test_an_nvcc_that_the_build_would_refuse_is_told_at_the_start(
    compiler, torch_cuda, reason, tmp_path, monkeypatch, capsys
):
    nvcc = f"echo 'Cuda compilation tools, release {compiler}, V{compiler}.88'"
    monkeypatch.setenv("CUDACXX", str(write_program(tmp_path / "nvcc", nvcc)))
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    all_there = dict.fromkeys(environment.look(), True)
    monkeypatch.setattr(environment, "look", lambda: all_there)
    assert environment.main(["--builds-cuda"]) == bool(reason)
    capsys.readouterr()
    assert environment.main([]) == bool(reason)
    told = re.search(r"^This machine can't build the CUDA extension: (.*)\.$", capsys.readouterr().out, re.MULTILINE)
    assert re.search(reason, told[1]) if told else not reason
    # What does not build asks for no nvcc.
    assert environment.main(["--no-build"]) == environment.main(["--cpu"]) == 0


def test_no_test_under_the_sanitizer_records_with_the_profiler() -> None:
    assert '-m "not profiler" tests/gpu/test_pack_gpu.py' in SCRIPT.read_text()
    source = (ROOT / "tests" / "gpu" / "test_pack_gpu.py").read_text()
    tests = re.findall(r"((?:^@.*\n)*)^def (test_\w+)(.*?)(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    recording = {name: decorators for decorators, name, body in tests if "profile" in body}
    assert recording and all("@pytest.mark.profiler" in decorators for decorators in recording.values())


def test_a_dry_run_elsewhere_has_the_files_of_the_checkout(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for path in ("csrc/kept.cpp", "csrc/deleted.cpp", "csrc/new.cpp", "built.so"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(path)
    (source / ".gitignore").write_text("*.so\n")
    os.utime(source / "csrc" / "kept.cpp", (1, 1))
    for command in (["init", "-q"], ["add", "csrc/kept.cpp", "csrc/deleted.cpp"]):
        subprocess.run(["git", *command], cwd=source, check=True)
    (source / "csrc" / "deleted.cpp").unlink()
    for path in ("build/object.o", "csrc/of_before.cpp"):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(path)
    copy_checkout(source, target)
    found = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert found == [".gitignore", "build/object.o", "csrc/kept.cpp", "csrc/new.cpp"]
    assert (target / "csrc" / "kept.cpp").stat().st_mtime == 1  # compiled once


def test_the_line_of_an_answer_that_tells_a_version() -> None:
    release = "Cuda compilation tools, release 13.0, V13.0.88"
    for text, line in (
        ("cmake version 4.4.4\n\nCMake suite maintained by Kitware", "cmake version 4.4.4"),
        (f"nvcc: NVIDIA (R)\n{release}", release),
        ("NVIDIA (R) Compute Sanitizer\nVersion 2025.3.1", "Version 2025.3.1"),
        ("1.13.2\n", "1.13.2"),
        ("", ""),
    ):
        assert environment.version_line(text) == line


def test_what_the_script_asks_of_the_environment(monkeypatch, capsys):
    folders = environment.tool_path()
    assert str(Path(sys.executable).parent) in folders and all(Path(folder).is_dir() for folder in folders)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    assert environment.main(["--architecture"]) == environment.main(["--lacks", "pytest", "no_such_package"]) == 0
    assert capsys.readouterr().out == "103-real\nno_such_package\n"


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
