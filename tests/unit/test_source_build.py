"""setup.py and `torchddp build` in small checkouts with a one-line extension: metadata, build errors, stale build
folders, and what is left of a build that fails or is interrupted.
"""

import email
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs import ROOT, clean_environment
from torchddp import _build, _extension
from torchddp._build import BuildError
from torchddp._extension import file_name, running_versions

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
        "torchddp/_extension.py": (ROOT / "torchddp" / "_extension.py").read_text(),
        "csrc/bindings/build_info.cpp": "const char* torchddp_version = TORCHDDP_VERSION;\n",
        "csrc/transport/transport.cpp": "int torchddp_transport() { return 1; }\n",
        "csrc/plan/plan.cpp": "int torchddp_plan() { return 1; }\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def setup(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """The exit status and all output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHDDP_", "PYTHON"))}
    command = [sys.executable, "setup.py", "-q", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, **pipes, cwd=folder, env=inherited | variables, text=True, timeout=300)
    return done.returncode, done.stdout


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


# --- torchddp build ---

RUNNING = running_versions()
BUILD = f"""
import sys
from pathlib import Path
from torchddp import _build, _extension
_build.source_dir = _extension.source_dir = lambda: Path(sys.argv[1])
try:
    print(_build.build({RUNNING!r}, "cpu"))
except _build.BuildError as error:
    sys.exit(f"refused: {{error}}")
"""


@pytest.fixture
def cache(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, for extensions of the small checkout."""
    for module in (_build, _extension):
        monkeypatch.setattr(module, "source_dir", lambda: checkout)
    monkeypatch.setenv("TORCHDDP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "extensions"


def start_build(checkout: Path, cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = clean_environment(TORCHDDP_CACHE_DIR=str(cache.parent), **variables)
    command, pipe = [sys.executable, "-c", BUILD, str(checkout)], subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def test_an_extension_is_compiled_into_the_cache_once(checkout: Path, cache: Path, capfd) -> None:
    path = _build.build(RUNNING, "cpu")
    assert path.name == file_name(RUNNING["torch"], "cpu") and path.is_relative_to(cache)
    said = capfd.readouterr().err
    assert f"torchddp: compiling for torch {RUNNING['torch']} (CPU): about two minutes\n" in said
    assert re.search(rf"torchddp: compiled in \d+ s: {re.escape(str(path))}", said)
    assert [left for left in cache.rglob("*") if left.is_file()] == [path] and not cache.stat().st_mode & 0o077
    assert _build.build(RUNNING, "cpu") == path and capfd.readouterr().err == ""
    (checkout / "csrc" / "plan" / "plan.cpp").write_text("int torchddp_plan() { return 2; }\n")
    assert _build.target_of(RUNNING, False) != path  # of other sources
    path.parent.chmod(0o775)
    (checkout / "csrc" / "plan" / "plan.cpp").write_text("int torchddp_plan() { return 1; }\n")
    with pytest.raises(BuildError, match="others can write to"):
        _build.build(RUNNING, "cpu")


def test_of_processes_that_build_at_once_one_compiles(checkout: Path, cache: Path) -> None:
    started = [start_build(checkout, cache) for _ in range(2)]
    done = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], done
    assert len({printed for printed, _ in done}) == 1
    assert sum("waiting for another process that compiles in this cache" in said for _, said in done) == 1
    assert len([left for left in cache.rglob("*") if left.is_file()]) == 1


def test_a_build_that_fails_says_why_and_leaves_nothing(checkout: Path, cache: Path, monkeypatch, capfd) -> None:
    # The compiler quotes the line, which is in no encoding of Python's.
    (checkout / "csrc" / "plan" / "plan.cpp").write_bytes(b"int torchddp_plan( { return 1; }  // \xe9\n")
    with pytest.raises(BuildError, match="^the extension does not compile; see the compiler's message above.$"):
        _build.build(RUNNING, "cpu")
    assert "plan.cpp:1:" in capfd.readouterr().err and not cache.exists()
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler was found; on Debian"):
        _build.build(RUNNING, "cpu")
    assert not cache.exists()
    for running, kind, words in (
        (RUNNING | {"cuda": ""}, "cuda", "is a CPU build: it has no CUDA to compile for"),
        (RUNNING | {"abi": "0"}, "cpu", "uses libstdc\\+\\+'s old C\\+\\+ ABI"),
    ):
        with pytest.raises(BuildError, match=words):
            _build.build(running, kind)


def test_a_torch_that_nobody_has_tried_is_compiled_for(checkout: Path, cache: Path, tmp_path: Path, capfd) -> None:
    project = checkout / "pyproject.toml"
    project.write_text(re.sub(r'torch-range = ".*"', 'torch-range = ">=2.1,<2.2"', project.read_text()))
    assert _build.build(RUNNING, "cpu").exists()
    assert "was tested with torch >=2.1,<2.2; compiling for 2." in capfd.readouterr().err
    project.write_text(re.sub(r'torch-range = ".*"', 'torch-range = ">=3.1,<3.2"', project.read_text()))
    with pytest.raises(BuildError, match=r"^torch 2\S+ is installed, and torchddp \S+ supports torch >=3\.1,<3\.2$"):
        _build.build(RUNNING, "cpu")


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found += [text] if str(folder) in text else []
    return found


@pytest.mark.rest_is_thorough("SIGINT", "SIGKILL")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_interrupted_build_leaves_nothing(checkout: Path, cache: Path, tmp_path: Path, number: int) -> None:
    slow = tmp_path / "slow-g++"  # in the compiler, not in CMake's checks of it
    slow.write_text('#!/bin/sh\ncase "$*" in *unity_0*) sleep 300;; esac\nexec g++ "$@"\n')
    slow.chmod(0o755)
    process = start_build(checkout, cache, CXX=str(slow))
    until = time.monotonic() + 100
    while not any("sleep 300" in line or "unity_0" in line for line in processes_of(tmp_path)):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    until = time.monotonic() + 30
    while processes_of(cache) or cache.exists():
        assert time.monotonic() < until, (processes_of(cache), list(cache.rglob("*")))
        time.sleep(0.05)


def test_what_a_killed_builder_left_is_removed(checkout: Path, cache: Path) -> None:
    target = _build.target_of(RUNNING, False)
    (target.parent / "building-abc" / "build").mkdir(parents=True, mode=0o700)
    for folder in (cache, *cache.rglob("*")):
        folder.chmod(0o700)
    assert _build.build(RUNNING, "cpu") == target
    assert list(target.parent.iterdir()) == [target]


def test_an_import_builds_when_it_may(checkout: Path, cache: Path) -> None:
    """TORCHDDP_BUILD=1; this small extension has no module to import."""
    code = BUILD.partition("try:")[0] + "import importlib; from torchddp import _import_check\n"
    code += "sys.modules.pop('torchddp._C'); _import_check.find = lambda running: None; _import_check.load_extension()"
    command = [sys.executable, "-c", code, str(checkout)]
    environment = clean_environment(TORCHDDP_CACHE_DIR=str(cache.parent), TORCHDDP_BUILD="1")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "torchddp: compiled in" in done.stderr
    assert "torchddp's compiled extension does not load" in done.stderr.splitlines()[-1]
