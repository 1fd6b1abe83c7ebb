"""Wheels and editable installations hold what TORCHDDP_INSTALL=1 needs: setup.py, with a compiler that does nothing."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {"torchddp_install.pth", "_torchddp_startup.py"}
BUILD = """
import subprocess, sys, sysconfig, types
from pathlib import Path
from setuptools import build_meta

def compile_nothing(command, **options):
    for argument in command:
        if argument.startswith("-DTORCHDDP_OUTPUT_DIR="):
            folder = Path(argument.partition("=")[2])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))).touch()
    return types.SimpleNamespace(returncode=0)

subprocess.run = compile_nothing
kind, out = sys.argv[1:]
sys.argv = ["setup.py"]
getattr(build_meta, f"build_{kind}")(out)
"""


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_both_kinds_of_wheel_hold_what_python_reads_when_it_starts(kind: str, tmp_path: Path) -> None:
    project, out = tmp_path / "project", tmp_path / "out"
    out.mkdir()
    shutil.copytree(ROOT / "torchddp", project / "torchddp", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)], cwd=project, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert FILES <= set(archive.namelist())
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]  # what pip uninstall removes
        assert FILES <= {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
        line = archive.read("torchddp_install.pth").decode()
        module = archive.read("_torchddp_startup.py").decode()
    assert line.startswith("import ") and line.count("\n") == 1, "site runs lines that begin with import"
    assert "_torchddp_startup" in line and "def start()" in module
