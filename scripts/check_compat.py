"""Compiles the sources against the headers of the oldest and the newest supported torch, with warnings as errors, and
looks up in their Python sources what `torchddp/_torch.py` imports.

Nothing is linked and no code is generated, but templates are instantiated, so the compiler checks what a build would.
Because torch's headers take most of the time, the sources of a target are compiled as one, and separately only if that
fails. The commands come from build/cpu; if build/cuda exists, CUDA-only sources are checked too, against that torch's
NCCL. scripts/torch_wheels.py extracts headers and sources from torch's wheels, once.
"""

import argparse
import ast
import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.torch_wheels import fetch

ROOT = Path(__file__).resolve().parent.parent
TORCHES = ("2.11.0", "2.15.0")
TORCH_INCLUDE = re.compile(r"(?<=-isystem )\S*/torch/include(?=[ /])")
NCCL_INCLUDE = re.compile(r"(?<=-isystem )\S*/nvidia/nccl/include(?= )")
UNITY_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
# Matches sources that the CUDA build compiles differently.
CUDA_CODE = re.compile(r"TORCHDDP_WITH_CUDA|#include <(c10/cuda|cuda|nccl)")


@dataclass(frozen=True)
class Check:
    """Sources that are compiled with the same command against one torch."""

    sources: tuple[Path, ...]
    torch: str
    command: tuple[str, ...]  # without a source


# --- what is imported ---


def missing_names(folder: Path, seam: Path = ROOT / "torchddp" / "_torch.py") -> list[str]:
    """What the module imports from torch that this torch's Python sources and stubs don't mention."""
    missing = []
    for node in ast.walk(ast.parse(seam.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.partition(".")[0] == "torch":
            path = folder / node.module.replace(".", "/")
            sources = [path.with_suffix(".py"), path.with_suffix(".pyi"), *path.glob("__init__.py*")]
            if node.module in ("torch", "torch._C"):  # torch re-exports its operators from the extension
                sources += (folder / "torch/_C").glob("*.pyi")
            text = "".join(source.read_text() for source in sources if source.exists())
            names = [alias.name for alias in node.names]
            missing += [f"{node.module}.{name}" for name in names if not re.search(rf"\b{name}\b", text)]
    return missing


# --- what to compile ---


def entries(build_dir: Path) -> dict[Path, str]:
    """The commands by source, for sources that include torch's headers."""
    path = build_dir / "compile_commands.json"
    if not path.exists():
        return {}
    found = {
        source: entry["command"] for entry in json.loads(path.read_text()) for source in sources_of(Path(entry["file"]))
    }
    return {source: command for source, command in found.items() if TORCH_INCLUDE.search(command)}


def sources_of(compiled: Path) -> list[Path]:
    """The sources included by one of CMake's unity files; any other file is returned as it is."""
    return [Path(name) for name in UNITY_INCLUDE.findall(compiled.read_text())] if is_unity(compiled) else [compiled]


def is_unity(compiled: Path) -> bool:
    return compiled.parent.name == "Unity" and compiled.exists()


def cuda_only(cpu: dict[Path, str], cuda: dict[Path, str]) -> dict[Path, str]:
    """Sources that only the CUDA build compiles, or compiles differently; kernels include no torch header."""
    return {
        source: command
        for source, command in cuda.items()
        if source.suffix == ".cpp" and (source not in cpu or CUDA_CODE.search(source.read_text()))
    }


def against(command: str, headers: Path) -> list[str]:
    """The build's command with other headers and warnings as errors, without source and output."""
    command = TORCH_INCLUDE.sub(str(headers / "torch" / "include"), command)
    command = NCCL_INCLUDE.sub(str(headers / "nvidia" / "nccl" / "include"), command)
    words = shlex.split(command)
    del words[words.index("-o") :]  # CMake ends with: -o OBJECT -c SOURCE
    return [*words, "-Werror", "-Wno-error=deprecated-declarations"]


def grouped(commands: dict[Path, str], torch: str, headers: Path) -> list[Check]:
    """Groups sources by command, because a target, or a file, may have its own definitions."""
    groups: dict[tuple[str, ...], list[Path]] = {}
    for source, command in sorted(commands.items()):
        groups.setdefault(tuple(against(command, headers)), []).append(source)
    return [Check(tuple(sources), torch, command) for command, sources in groups.items()]


def plan(torches: list[str]) -> list[Check]:
    cpu = entries(ROOT / "build" / "cpu")
    if not cpu:
        sys.exit("compat: build/cpu has no compile_commands.json; run `make build` first")
    cuda = cuda_only(cpu, entries(ROOT / "build" / "cuda"))
    if not cuda:
        print("compat: CUDA-only sources are not checked (see `make cuda-build`)")
    checks = []
    for torch in torches:
        headers = fetch(torch)
        with_cuda = cuda if (headers / "torch/include/c10/cuda/CUDAStream.h").exists() else {}
        if cuda and not with_cuda:
            print(f"compat: torch {torch} of this index is a CPU build: {len(cuda)} CUDA sources are not checked")
        checks += grouped(cpu, torch, headers) + grouped(with_cuda, torch, headers)
    return checks


# --- compiling ---


def compiler_errors(command: tuple[str, ...], sources: tuple[Path, ...]) -> str:
    """The compiler's errors, or ""."""
    with tempfile.NamedTemporaryFile("w", suffix=".cpp") as together:
        together.write("".join(f'#include "{source}"\n' for source in sources))
        together.flush()
        name = together.name if len(sources) > 1 else str(sources[0])
        done = subprocess.run([*command, "-fsyntax-only", name], cwd=ROOT, capture_output=True, text=True)
    return done.stderr or f"exit code {done.returncode}" if done.returncode else ""


def failures(check: Check) -> dict[Path, str]:
    """Errors by source."""
    if len(check.sources) > 1 and not compiler_errors(check.command, check.sources):
        return {}
    # Compiling them as one may fail for valid sources: two files may define the same local name.
    alone = {source: compiler_errors(check.command, (source,)) for source in check.sources}
    return {source: errors for source, errors in alone.items() if errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torches", nargs="+", default=list(TORCHES), help="versions of torch")
    newest = "only the newest; `make dry-run` builds with the oldest"
    parser.add_argument("--newest", dest="torches", action="store_const", const=TORCHES[1:], help=newest)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers to run in parallel")
    args = parser.parse_args()
    checks = plan(args.torches)
    for torch in args.torches:
        if missing := missing_names(fetch(torch)):
            sys.exit(f"compat: torch {torch} has no {', '.join(missing)}, which torchddp/_torch.py imports")
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(failures, checks))
    num_failed = 0
    for check, errors_by_source in zip(checks, found, strict=True):
        for source, errors in errors_by_source.items():
            num_failed += 1
            print(f"--- {source.relative_to(ROOT)} against torch {check.torch}:\n{errors}")
    if num_failed:
        sys.exit(f"compat: {num_failed} sources do not compile")
    num_compiled = sum(len(check.sources) for check in checks)
    print(f"compat: {num_compiled} sources compile, torch {' and '.join(args.torches)}")


if __name__ == "__main__":
    main()
