"""Checks what tests/gpu/run.sh needs on this machine.

`environment.py` prints a report and fails if something is missing; `environment.py --tool-path` prints folders with
build tools that may not be on the PATH, `environment.py --architecture` the GPU's name for CMake, and `environment.py
--lacks PACKAGE...` the packages that are missing, `environment.py --extension cpu` (or cuda) the extension's file;
`environment.py --builds-cuda` fails if the CUDA extension cannot be built here.
"""

import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("torch", "numpy", "pytest")
# A run without these does less.
USEFUL_PACKAGES = {
    "pytest_timeout": "a test that hangs takes the whole time of its step",
    "typer": "no benchmarks",
    "rich": "no benchmarks",
    "matplotlib": "no plots",
}
CUDA_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def tool_path() -> list[str]:
    """Folders of cmake, ninja and nvcc: of this interpreter, of pip's packages, and of CUDA installations."""
    folders = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    for package, folder in (("cmake", "data/bin"), ("ninja", "data/bin")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent / folder))
    folders += [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders += CUDA_FOLDERS
    return list(dict.fromkeys(folder for folder in folders if Path(folder).is_dir()))


def architecture() -> str:
    """The first GPU's value for CMAKE_CUDA_ARCHITECTURES, with machine code only; Hopper's without a GPU."""
    import torch

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return f"{major}{minor}-real"


def extension(kind: str) -> str:
    """The file that `import torchddp` looks for."""
    import torch

    names = runpy.run_path(str(Path(__file__).parents[2] / "torchddp" / "_extension.py"))
    name: str = names["file_name"](torch.__version__, names["kind_name"](torch.version.cuda if kind == "cuda" else ""))
    return name


def nvcc() -> str:
    return os.environ.get("CUDACXX") or "nvcc"


def reason_against_cuda() -> str:
    """Why the CUDA extension can't be built here, by the rules of cmake/cuda_version.cmake; empty if it can."""
    import torch

    answer = _output_of(nvcc(), "--version")
    release = re.search(r"release (\d+)\.(\d+)", answer)
    if release is None:
        return f"'{nvcc()} --version' does not tell its CUDA: {answer}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: it must be a CUDA build"
    found = tuple(map(int, release.groups()))
    newest = tuple(map(int, torch.version.cuda.split(".")[:2]))
    if (newest[0], 0) <= found <= newest:
        return ""
    return (
        f"nvcc is CUDA {found[0]}.{found[1]}, torch {torch.__version__} was built with CUDA {torch.version.cuda}: nvcc "
        f"must be of CUDA {newest[0]}.0 to {newest[0]}.{newest[1]}, on the PATH or named in CUDACXX"
    )


def missing(found: dict[str, bool], *, on_gpu: bool, builds: bool) -> list[str]:
    """The required items that were not found."""
    needed = [f"Python package {name}" for name in PACKAGES]
    if builds:
        needed += ["cmake", "ninja or make", "C++ compiler", "Python.h"] + (["nvcc"] if on_gpu else [])
    if on_gpu:
        needed.append("CUDA device")
    return [what for what in needed if not found[what]]


def find_items() -> dict[str, bool]:
    absent = lacks(PACKAGES)
    found = {f"Python package {name}": name not in absent for name in PACKAGES}
    found |= {name: shutil.which(tool) is not None for name, tool in {"cmake": "cmake", "nvcc": nvcc()}.items()}
    found["ninja or make"] = any(map(shutil.which, ("ninja", "make")))
    found["C++ compiler"] = any(map(shutil.which, ("c++", "g++", "clang++")))
    found["Python.h"] = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    found["CUDA device"] = False
    if found["Python package torch"]:
        import torch

        found["CUDA device"] = torch.cuda.is_available()
    return found


def lacks(packages: Iterable[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not to be had ({type(error).__name__})"
    return version_line(done.stdout or done.stderr) or f"nothing (exit code {done.returncode})"


def version_line(text: str) -> str:
    """The line of a program's output that has its version."""
    lines = text.strip().splitlines() or [""]
    return next((line for line in lines if re.search(r"(version|release)\D{0,2}\d", line, re.IGNORECASE)), lines[0])


def report() -> None:
    """Print versions, one per line."""
    print(f"python      {platform.python_version()} {sys.executable}")
    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv,noheader")
    for name, command in {
        "cmake": ("cmake", "--version"),
        "ninja": ("ninja", "--version"),
        "c++": ("c++", "-dumpfullversion"),
        "nvcc": (nvcc(), "--version"),
        "sanitizer": ("compute-sanitizer", "--version"),
        "GPU, driver": query,
    }.items():
        print(f"{name:<11} {_output_of(*command)}")
    print(f"cores       {len(os.sched_getaffinity(0))}")
    for name in lacks(USEFUL_PACKAGES):
        print(f"without     {name}: {USEFUL_PACKAGES[name]}")
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    print(f"torch       {torch.__version__}, CUDA {torch.version.cuda}")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        print(f"NCCL        {'.'.join(map(str, torch.cuda.nccl.version()))}")
        print(f"device      {torch.cuda.get_device_name()}, compute capability {major}.{minor}")


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--tool-path"]:
            print(os.pathsep.join(tool_path()))
        case ["--architecture"]:
            print(architecture())
        case ["--extension", kind]:
            print(extension(kind))
        case ["--builds-cuda"]:
            return int(bool(reason_against_cuda()))
        case ["--lacks", *packages]:
            print(*lacks(packages))
        case _:
            return check(on_gpu="--cpu" not in arguments, builds="--no-build" not in arguments)
    return 0


def check(*, on_gpu: bool, builds: bool) -> int:
    report()
    found = find_items()
    lacking = missing(found, on_gpu=on_gpu, builds=builds)
    if lacking:
        print(f"This machine lacks: {', '.join(lacking)}.")
    asked = on_gpu and builds and found["nvcc"] and found["Python package torch"]
    reason = reason_against_cuda() if asked else ""
    if reason:
        print(f"This machine can't build the CUDA extension: {reason}.")
    return int(bool(lacking or reason))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
