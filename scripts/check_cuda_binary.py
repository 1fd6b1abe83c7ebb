"""Checks the GPU code in a built extension: machine code for each architecture, and PTX for later ones.

`python -m scripts.check_cuda_binary build/cuda-package/torchddp/_C...so --build-dir build/cuda`, with an interpreter
that has nvidia-cuda-cuobjdump. Needs no GPU.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100")


def cuda_sources(build_dir: Path) -> list[dict[str, str]]:
    """The entries of the .cu files in the build's compile_commands.json."""
    entries = json.loads((build_dir / "compile_commands.json").read_text())
    return [entry for entry in entries if entry["file"].endswith(".cu")]


def find_cuobjdump() -> str:
    """Finds cuobjdump in NVIDIA's wheel among this interpreter's packages, or in the toolkit."""
    for folder in map(Path, sys.path):
        for found in folder.glob("nvidia/cu*/bin/cuobjdump"):
            return str(found)
    found_in_path = shutil.which("cuobjdump")
    if found_in_path is None:
        sys.exit(f"no cuobjdump; install it with: {sys.executable} -m pip install nvidia-cuda-cuobjdump")
    return found_in_path


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
    sources = cuda_sources(args.build_dir)
    if not sources:
        print("GPU code: the build has no .cu file")
        return
    cuobjdump = find_cuobjdump()
    elf_list, ptx_list = (listing(cuobjdump, option, args.extension) for option in ("--list-elf", "--list-ptx"))
    problems = code_problems(elf_list, ptx_list)
    if problems:
        sys.exit("\n".join(f"{args.extension.name}: {problem}" for problem in problems))
    print(f"GPU code: {', '.join(ARCHS)} and PTX of {ARCHS[-1]}, from {len(sources)} .cu files")


if __name__ == "__main__":
    main()
