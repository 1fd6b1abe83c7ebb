"""Runs CMake and Ninja for setup.py and `torchddp build`. Needs neither setuptools nor torchddp; does not import torch.

Environment variables: TORCHDDP_CUDA=1 (build the CUDA variant), TORCHDDP_WERROR=1 (warnings are errors),
TORCHDDP_UNITY=0 (compile each source by itself) and MAX_JOBS=N.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# An error message from our CMake files, which CMake wraps and indents.
CMAKE_ERROR = re.compile(r"^  (torchddp: .+\n(?:  .+\n)*)", re.MULTILINE)


def tool(name: str) -> str:
    """The path of cmake or ninja: this interpreter's own (installed by pip) first, then the system's."""
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which(name, path=beside_python) or shutil.which(name)
    if found is None:
        raise SystemExit(f"torchddp: {name} was not found; install it with: {sys.executable} -m pip install {name}")
    return found


def is_on(name: str, default: str = "") -> bool:
    return os.environ.get(name, default).upper() in {"1", "ON", "TRUE", "YES"}


def _option(name: str, default: str = "") -> str:
    """An ON/OFF option for CMake from the environment variable of the same name."""
    return f"-D{name}={'ON' if is_on(name, default) else 'OFF'}"


def project_value(source: Path, name: str) -> str:
    """The value of a line `name = "..."` of pyproject.toml. Python before 3.11 has no TOML parser."""
    line = re.search(rf'^{name} = "([^"]+)"$', (source / "pyproject.toml").read_text(), re.MULTILINE)
    if line is None:
        raise SystemExit(f"torchddp: found no line '{name} = \"...\"' in {source / 'pyproject.toml'}.")
    return line.group(1)


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu."""
    numbers = version.split("+")[0].split(".")
    return int(numbers[0]), int(numbers[1])


def check_torch(source: Path, torch: str) -> None:
    """Refuses a torch that is too old. One that is newer than any that we know may well work."""
    supported = project_value(source, "torch-range")
    oldest, beyond = (minor(bound) for bound in re.findall(r"[\d.]+", supported))
    version = f"torchddp {project_value(source, 'version')}"
    if minor(torch) < oldest:
        raise SystemExit(f"torchddp: torch {torch} is installed, and {version} supports torch {supported}")
    if minor(torch) >= beyond:
        print(f"torchddp: {version} was tested with torch {supported}; compiling for {torch} may fail", flush=True)


def configure(source: Path, build_dir: Path, output_dir: Path, output_name: str) -> None:
    """Prepares a build folder. SystemExit with one sentence if something is missing."""
    _discard_stale(source, build_dir)
    command = [tool("cmake"), "-S", str(source), "-B", str(build_dir), "-G", "Ninja"]
    command += [
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DTORCHDDP_PYTHON={sys.executable}",
        f"-DTORCHDDP_OUTPUT_DIR={output_dir}",
        f"-DTORCHDDP_OUTPUT_NAME={output_name}",
        _option("TORCHDDP_CUDA"),
        _option("TORCHDDP_WERROR"),
        _option("TORCHDDP_UNITY", default="ON"),
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode and (ours := CMAKE_ERROR.search(done.stderr)):
        raise SystemExit(" ".join(ours[1].split()))  # one sentence, because pip shows only the last lines
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise SystemExit(f"torchddp: '{' '.join(command[:3])} ...' failed; see CMake's message above.")


def run_ninja(build_dir: Path, **variables: str) -> None:
    """Compiles what has changed. SystemExit if it does not compile."""
    jobs = os.environ.get("MAX_JOBS")
    # Not by `cmake --build`, which, when it is ended, kills Ninja, whose compilers then go on.
    command = [tool("ninja"), *(["-j", jobs] if jobs else [])]
    # Ninja, too, would ask for jobs of a `make -j`, with descriptors that Python has not passed on.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    # SIGPIPE stays ignored: where nobody reads Ninja's output any more, it must live on to end its compilers.
    if subprocess.run(command, cwd=build_dir, env=environment | variables, restore_signals=False).returncode:
        raise SystemExit("torchddp: the extension does not compile; see the compiler's message above.")


def build(build_dir: Path, facts: Mapping[str, str]) -> None:
    """The same for a person, who is told how long it takes the first time."""
    if not (build_dir / ".ninja_log").exists():
        print(f"torchddp: compiling for torch {facts['TORCH_VERSION']}: about 100 s on two cores", flush=True)
    run_ninja(build_dir)


def _discard_stale(source: Path, build_dir: Path) -> None:
    """Deletes a build folder of another checkout, or one whose compiler is gone: CMake refuses both."""
    cache = build_dir / "CMakeCache.txt"
    if not cache.exists():
        return
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE))
    of_this_checkout = (entries.get("CMAKE_HOME_DIRECTORY"), entries.get("CMAKE_CACHEFILE_DIR")) == (
        str(source),
        str(build_dir),
    )
    compilers = [entries[name] for name in ("CMAKE_CXX_COMPILER", "CMAKE_CUDA_COMPILER") if name in entries]
    if not of_this_checkout or not all(map(os.path.exists, compilers)):
        print(f"torchddp: {build_dir} belongs to another checkout or compiler; rebuilding it from scratch", flush=True)
        shutil.rmtree(build_dir)
