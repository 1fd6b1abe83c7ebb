"""tests/gpu/run.sh without a GPU: failed, skipped, chosen and stopped steps."""

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from tests.gpu.device import DEVICE_ENV
from tests.gpu.test_two_ranks_nccl import LIBRARY_ENV
from tests.programs import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "run.sh"
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


def test_a_missing_package_or_library_skips_only_what_needs_it(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "libnccl.so.2").write_bytes(b"\x7fELF" + os.urandom(2**21))
    library = "libnccl.so.2.xz"
    commands = f"xz libnccl.so.2; split -b 1M -d {library} parts/{library}.part; "
    commands += f"sha256sum {library} >parts/{library}.sha256"
    subprocess.run(commands, shell=True, check=True, cwd=tmp_path)
    python = fake_python(
        tmp_path,
        rf"*environment.py\ --tool-path*) echo {tmp_path}; exit 0 ;; "
        r"*--lacks\ typer*) echo typer rich; exit 0 ;; *--lacks\ pytest_timeout) echo pytest_timeout; exit 0 ;; "
        rf'*-m\ pytest*test_two_ranks_nccl*) head -c 4 "${LIBRARY_ENV}" || echo "no library"; exit 3 ;; '
        r'*-m\ pytest*test_parity*) echo "a broken pipe"; exit 3 ;; ' + NOTHING_TO_DO,
    )
    write_program(tmp_path / "cmake", "exit 0")
    variables = {LIBRARY_ENV: str(parts)}
    done = run_script(tmp_path / "results", "--dry-run", python=python, **variables)
    table = rows(done.stdout)
    for name in ("bench", "bench_rows", "bench_two_ranks"):
        assert table[name] == ("skipped", "no Python package typer, rich: put it on PYTHONPATH"), name
    assert table["test_parity"] == ("FAILED", "exit status 3") and "a broken pipe" in done.stdout
    assert table["test_pack_gpu"][0] == table["join_nccl"][0] == "ok" and "--timeout" not in done.stdout
    assert done.returncode == 1 and "something FAILED" in done.stdout.splitlines()[-1]
    assert "ELF" in done.stdout and "no library" not in done.stdout
    (parts / f"{library}.part01").unlink()
    only = ("--dry-run", "--skip-build", "--only", "two_ranks,test_graph")
    done = run_script(tmp_path / "results", *only, python=python, **variables)
    table = rows(done.stdout)
    assert list(table) == ["environment", "test_graph", "join_nccl", "test_two_ranks_nccl", "test_two_ranks_gloo"]
    assert table["join_nccl"][0] == "FAILED"
    assert "did NOT match" in done.stdout and "no library" in done.stdout


def test_a_stopped_run_reports_the_tests_so_far(tmp_path: Path) -> None:
    out = tmp_path / "results"
    command = command_of(out, "--dry-run", "--skip-build", "--only", "test_pack_gpu")
    with subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        deadline_s = time.monotonic() + 300
        output = out / "running.txt"
        while not (output.is_file() and output.read_text().count(" PASSED") >= 2):
            assert run.poll() is None and time.monotonic() < deadline_s, "no test has passed"
            time.sleep(0.01)
        run.terminate()
        said, _ = run.communicate(timeout=60)
    assert run.returncode == 143 and "interrupted after" in said
    assert len(list(ET.parse(out / "tests.xml").getroot().iter("testcase"))) >= 2
    assert rows((out / "summary.txt").read_text())["test_pack_gpu"] == ("FAILED", "interrupted")
    assert {file.name for file in out.iterdir()} == {"summary.txt", "tests.xml", "logs.txt"}
