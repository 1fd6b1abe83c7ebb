"""setup.py in small checkouts with a one-line extension: metadata, build errors, and stale build folders."""

import email
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from tests.programs import ROOT

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The real build files with sources that compile quickly."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "cmake", folder / "cmake")
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name, text in {
        "torchddp/__init__.py": "",
        "csrc/bindings/build_info.cpp": "const char* torchddp_version = TORCHDDP_VERSION;\n",
        "csrc/transport/transport.cpp": "int torchddp_transport() { return 1; }\n",
        "csrc/plan/plan.cpp": "int torchddp_plan() { return 1; }\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def setup(folder: Path, *arguments: str, flags: tuple[str, ...] = (), **variables: str) -> tuple[int, str]:
    """The exit status and all output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHDDP_", "PYTHON"))}
    command = [sys.executable, *flags, "setup.py", "-q", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, **pipes, cwd=folder, env=inherited | variables, text=True, timeout=300)
    return done.returncode, done.stdout


def build(folder: Path, **variables: str) -> tuple[int, str]:
    return setup(folder, "build_ext", "--inplace", **variables)


def refusal(outcome: tuple[int, str]) -> str:
    """The last line of a failed build; asserts that no traceback or CMake context comes before it."""
    code, printed = outcome
    assert code == 1 and "Traceback" not in printed and "CMake Error" not in printed, printed
    return printed.strip().splitlines()[-1]


def write_torch(folder: Path, version: str, cuda: str | None) -> dict[str, str]:
    """A fake torch of this version, found before the installed one."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise SystemExit('the build must not import torch')\n")
    (folder / "torch" / "version.py").write_text(f"__version__ = {version!r}\ncuda: str | None = {cuda!r}\n")
    return {"PYTHONPATH": str(folder)}


def metadata(folder: Path, **variables: str) -> email.message.Message:
    code, printed = setup(folder, "egg_info", **variables)
    assert code == 0, printed
    return email.message_from_string((folder / "torchddp.egg-info" / "PKG-INFO").read_text())


def test_a_wheel_requires_the_torch_that_it_was_built_for(checkout: Path, tmp_path: Path) -> None:
    for release, cuda, variables, version, requirement in (
        ("2.13.0+cpu", None, {}, "+cpu.torch2.13", "torch==2.13.*"),
        ("2.11.1", "13.0", {"TORCHDDP_CUDA": "1"}, "+cu130.torch2.11", "torch==2.11.*"),
        ("2.15.0a0+git1234", "13.2", {}, "+cpu.torch2.15", "torch==2.15.*"),
    ):
        said = metadata(checkout, **write_torch(tmp_path / release, release, cuda), **variables)
        assert said["Version"].endswith(version), release
        assert [line for line in said.get_all("Requires-Dist", []) if "extra" not in line] == [requirement], release


def test_without_torch_one_sentence_says_how_to_build(checkout: Path, tmp_path: Path) -> None:
    """`pip install .` builds in isolation and sees no torch, even if it is installed."""
    (tmp_path / "only").mkdir()
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / "only" / name).symlink_to(Path(setuptools.__file__).parents[1] / name)
    line = refusal(setup(checkout, "egg_info", flags=("-S",), PYTHONPATH=str(tmp_path / "only")))
    assert line.startswith("torchddp: this build sees no torch in ") and "`pip install --no-build-isolation .`" in line


def test_an_unsupported_torch_or_setuptools_is_refused(checkout: Path, tmp_path: Path) -> None:
    for release in ("2.10.1", "2.16.0+cu132"):
        said = refusal(setup(checkout, "egg_info", **write_torch(tmp_path / release, release, None)))
        installed = rf"torchddp: torch {re.escape(release)} is installed"
        assert re.fullmatch(rf"{installed}, and torchddp \S+ supports torch \S+", said)
    (tmp_path / "setuptools" / "command").mkdir(parents=True)
    (tmp_path / "setuptools" / "__init__.py").write_text("__version__ = '65.5.0'\nExtension = setup = None\n")
    (tmp_path / "setuptools" / "command" / "build_ext.py").write_text("build_ext = object\n")
    said = refusal(setup(checkout, "egg_info", PYTHONPATH=str(tmp_path)))
    assert said.startswith("torchddp: setuptools 65.5.0 is too old") and "pip install --upgrade setuptools" in said


def test_without_a_compiler_one_sentence_names_the_package(checkout: Path) -> None:
    # CMake searches /usr/bin even if it is not in PATH, so this sets CXX.
    said = refusal(build(checkout, CXX="/nowhere/g++"))
    assert said.endswith("no C++ compiler was found; on Debian and Ubuntu install one with: apt-get install g++")
    assert build(checkout)[0] == 0  # a compiler that is installed later is found
