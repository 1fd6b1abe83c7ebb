"""Fails if a kernel spills registers to memory, and names it.

`python -m scripts.check_cuda_spills --build-dir build/cuda` recompiles the .cu files as the build does, to get
ptxas's output: a build with up-to-date objects prints none.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.check_cuda_binary import cuda_sources

COMPILING = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
FUNCTION = re.compile(r"Function properties for (\S+)")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Function:
    """ptxas's report on one function, kernel or not, for one architecture."""

    name: str
    arch: str
    stack_bytes: int
    spilled_bytes: int


def read_log(log: str) -> list[Function]:
    """Parses the output of `nvcc -Xptxas -v`."""
    functions = []
    name = arch = "?"
    for line in log.splitlines():
        if found := COMPILING.search(line):
            name, arch = found.groups()
        elif found := FUNCTION.search(line):
            name = found.group(1)
        elif found := SPILL.search(line):
            stack, stores, loads = map(int, found.groups())
            functions.append(Function(name, arch, stack, stores + loads))
    return functions


def compile_verbosely(entry: dict[str, str], folder: str) -> str:
    """The output of the entry's command with -Xptxas -v; the object is discarded."""
    command = shlex.split(entry["command"])
    command[command.index("-o") + 1] = str(Path(folder) / "object.o")
    done = subprocess.run([*command, "-Xptxas", "-v"], cwd=entry["directory"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{entry['file']}: {done.stderr}")
    return done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", type=Path, required=True)
    args = parser.parse_args()
    functions = []
    for entry in cuda_sources(args.build_dir):
        with tempfile.TemporaryDirectory() as folder:
            found = read_log(compile_verbosely(entry, folder))
        if not found:
            sys.exit(f"{entry['file']}: ptxas reported no functions; has its output format changed?")
        functions += found
    spilling = [function for function in functions if function.spilled_bytes]
    for function in spilling:
        print(f"{function.name} for {function.arch} spills {function.spilled_bytes} bytes", file=sys.stderr)
    if spilling:
        sys.exit("spills: use fewer registers per thread, or smaller blocks (__launch_bounds__)")
    print(f"spills: none in {len(functions)} functions")


if __name__ == "__main__":
    main()
