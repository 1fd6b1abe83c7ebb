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
USEFUL_PACKAGES = ("pytest_timeout", "typer", "rich", "matplotlib")  # a run without these does less
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


def builds_cuda() -> bool:
    """Whether the CUDA extension can be built here, by the rules of cmake/cuda_version.cmake."""
    import torch

    release = re.search(r"release (\d+)\.(\d+)", output_of(nvcc(), "--version"))
    if release is None or torch.version.cuda is None:
        return False
    major, minor = map(int, torch.version.cuda.split(".")[:2])
    return (major, 0) <= tuple(map(int, release.groups())) <= (major, minor)


def missing(*, on_gpu: bool, builds: bool) -> list[str]:
    """The required items that were not found."""
    tools: dict[str, tuple[str, ...]] = {}
    if builds:
        tools = {"cmake": ("cmake",), "ninja or make": ("ninja", "make"), "C++ compiler": ("c++", "g++", "clang++")}
    if builds and on_gpu:
        tools["nvcc"] = (nvcc(),)
    found = [f"Python package {name}" for name in lacks(PACKAGES)]
    found += [what for what, names in tools.items() if not any(map(shutil.which, names))]
    if builds and not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        found.append("Python.h")
    if on_gpu and not lacks(["torch"]):
        import torch

        found += [] if torch.cuda.is_available() else ["CUDA device"]
    return found


def lacks(packages: Iterable[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not to be had ({type(error).__name__})"
    return (done.stdout or done.stderr).strip().replace("\n", "; ")


def report() -> None:
    """Print versions, one per line."""
    print(f"python      {platform.python_version()} {sys.executable}")
    query = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv,noheader")
    for name, command in {
        "cmake": ("cmake", "--version"),
        "c++": ("c++", "-dumpfullversion"),
        "nvcc": (nvcc(), "--version"),
        "sanitizer": ("compute-sanitizer", "--version"),
        "GPU, driver": query,
    }.items():
        print(f"{name:<11} {output_of(*command)}")
    print(f"cores       {len(os.sched_getaffinity(0))}")
    print(f"without     {', '.join(lacks(USEFUL_PACKAGES)) or 'nothing'}")
    if lacks(["torch"]):
        return
    import torch

    print(f"torch       {torch.__version__}, CUDA {torch.version.cuda}")
    if torch.cuda.is_available():
        print(f"NCCL        {'.'.join(map(str, torch.cuda.nccl.version()))}")
        print(f"device      {torch.cuda.get_device_name()}, compute capability {torch.cuda.get_device_capability()}")


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--tool-path"]:
            print(os.pathsep.join(tool_path()))
        case ["--architecture"]:
            print(architecture())
        case ["--extension", kind]:
            print(extension(kind))
        case ["--builds-cuda"]:
            return int(not builds_cuda())
        case ["--lacks", *packages]:
            print(*lacks(packages))
        case _:
            report()
            lacking = missing(on_gpu="--cpu" not in arguments, builds="--no-build" not in arguments)
            if lacking:
                print(f"This machine lacks: {', '.join(lacking)}.")
            return int(bool(lacking))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
