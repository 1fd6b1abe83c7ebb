"""Checks the GPU code in a built extension: machine code for each architecture, PTX for later ones, and what nvcc made
of the pack kernels.

`python -m scripts.check_cuda_binary build/cuda-package/torchddp/_C...so --build-dir build/cuda`, with an interpreter
that has nvidia-cuda-cuobjdump, and torch's triton, which has the disassembler. Needs no GPU.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100")
# Four blocks of 256 threads on each multiprocessor. With fewer, too few loads are in flight.
MAX_REGISTERS = 64
# Bytes by the number of the DType in a kernel's name (csrc/kernels/dtype.h), of the flat and the other type.
ITEM_SIZES = (8, 4, 2, 2, 1, 1, 2, 4, 8)
TYPES_IN_NAME = re.compile(r"pack_kernel.*?DTypeE(\d)E\w+?_(\d)E")
ACCESSES_OF_A_THREAD = 4  # of 16 bytes, at the wider end: kThreadBytes in csrc/kernels/pack_device_body.h


def count_cuda_sources(build_dir: Path) -> int:
    """The number of .cu files in the build's compile_commands.json."""
    entries = json.loads((build_dir / "compile_commands.json").read_text())
    return sum(entry["file"].endswith(".cu") for entry in entries)


def find_tool(name: str) -> str | None:
    """A tool of CUDA in NVIDIA's wheels or triton, among this interpreter's packages, or in the toolkit."""
    places = (f"nvidia/cu*/bin/{name}", f"triton/backends/nvidia/bin/{name}")
    found = (str(path) for folder in map(Path, sys.path) for place in places for path in folder.glob(place))
    return next(found, None) or shutil.which(name)


def code_problems(elf_list: str, ptx_list: str) -> list[str]:
    """Lists missing code from the output of cuobjdump --list-elf and --list-ptx, a line per file and architecture."""
    files = {arch: re.findall(rf"\.{arch}\.cubin$", elf_list, re.MULTILINE) for arch in ARCHS}
    most = max(map(len, files.values()))
    problems = [
        f"machine code for {arch}: {len(found)} files, but {most} for another architecture"
        for arch, found in files.items()
        if len(found) < max(most, 1)
    ]
    newest = ARCHS[-1]
    ptx = re.findall(rf"\.{newest}\.ptx$", ptx_list, re.MULTILINE)
    if len(ptx) < max(most, 1):
        problems.append(f"PTX of {newest}, for future GPUs: {len(ptx)} files, machine code: {most}")
    return problems


def functions(listing: str) -> Iterator[tuple[str, str, str]]:
    """Architecture, name and text of each function in the output of cuobjdump -res-usage or -sass."""
    for code in re.split(r"^arch = ", listing, flags=re.MULTILINE)[1:]:
        arch = code.split(maxsplit=1)[0]
        for function in re.split(r"^\s*Function (?:: )?", code, flags=re.MULTILINE)[1:]:
            name, _, text = function.partition("\n")
            yield arch, name.rstrip(":"), text


def resource_problems(usage: str) -> list[str]:
    """Kernels that take too many registers, or local memory for what did not fit into them."""
    problems = []
    for arch, name, text in functions(usage):
        used = {what: int(number) for what, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
        if used["STACK"] or used["LOCAL"] or used["REG"] > MAX_REGISTERS:
            problems.append(f"{name} for {arch}: {used}; at most {MAX_REGISTERS} registers, and no stack")
    return problems


def instruction_problems(sass: str) -> list[str]:
    """Pack kernels that access local memory, or a tensor in narrower steps than 16 bytes where it is aligned."""
    problems = []
    for arch, name, text in functions(sass):
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z][\w.]+)", text)
        counts = Counter("128-bit " + op[:3] if op[:3] in ("LDG", "STG") and ".128" in op else op[:3] for op in found)
        types = TYPES_IN_NAME.search(name)
        if types is None:
            problems.append(f"{name} for {arch} is not known to this script")
            continue
        stored, loaded = (ITEM_SIZES[int(number)] for number in types.groups())
        for what, size in (("128-bit LDG", loaded), ("128-bit STG", stored)):
            wanted = max(1, ACCESSES_OF_A_THREAD * size // max(stored, loaded))
            if counts[what] < wanted:
                problems.append(f"{name} for {arch}: {what} {counts[what]} times, not {wanted}")
        if counts["LDL"] or counts["STL"]:
            problems.append(f"{name} for {arch} accesses local memory")
    return problems


def listing(cuobjdump: str, option: str, extension: Path) -> str:
    """The output of cuobjdump; "" if there is no code of that kind, for which it exits with an error."""
    done = subprocess.run([cuobjdump, option, str(extension)], capture_output=True, text=True)
    if done.returncode and "does not contain device code" not in done.stdout + done.stderr:
        sys.exit(f"{cuobjdump} {option} {extension}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extension", type=Path)
    parser.add_argument("--build-dir", type=Path, required=True)
    args = parser.parse_args()
    sources = count_cuda_sources(args.build_dir)
    if not sources:
        print("GPU code: the build has no .cu file")
        return
    cuobjdump, disassembler = map(find_tool, ("cuobjdump", "nvdisasm"))
    if cuobjdump is None:
        sys.exit(f"no cuobjdump; install it with: {sys.executable} -m pip install nvidia-cuda-cuobjdump")
    problems = code_problems(*(listing(cuobjdump, option, args.extension) for option in ("--list-elf", "--list-ptx")))
    usage = listing(cuobjdump, "-res-usage", args.extension)
    problems += resource_problems(usage)
    if disassembler is not None:
        os.environ["NVDISASM_PATH"] = str(Path(disassembler).parent)
        problems += instruction_problems(listing(cuobjdump, "-sass", args.extension))
    if problems:
        sys.exit("\n".join(f"{args.extension.name}: {problem}" for problem in problems))
    kernels = Counter(arch for arch, _, _ in functions(usage))
    if set(kernels) != set(ARCHS):
        sys.exit(f"kernels for {', '.join(kernels)} alone; has the output of cuobjdump changed?")
    most = max(map(int, re.findall(r"\bREG:(\d+)", usage)))
    counted = ", ".join(f"{number} kernels for {arch}" for arch, number in kernels.items())
    print(f"GPU code: {counted}, and PTX of {ARCHS[-1]}; at most {most} registers, no local memory")
    accesses = "128-bit loads and stores in all of them"
    print(f"GPU code: {accesses}" if disassembler else f"GPU code: skipped, no nvdisasm: {accesses}")


if __name__ == "__main__":
    main()
