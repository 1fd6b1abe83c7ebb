"""Makes one wheel of several that scripts/build_wheel.py has built for the same Python: it has all their extensions, a
version that any index accepts, and works with each of their torches.

`python -m scripts.join_wheels PARTS...` joins these; with --torches it first fetches these versions of torch and builds
a part for each, for the CPU and, where there is an nvcc, for CUDA.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.build_wheel import PLATFORM, ROOT, report, run
from scripts.check_wheel import content_problems, extensions, metadata_problems, read_metadata, tag_problems
from scripts.torch_wheels import PYTHON_TAG, fetch

PARTS_DIR = ROOT / "build" / "wheel" / "parts"
MAX_CPU_MB = 25  # of the CPU's extensions and everything else, compressed


def requirement() -> str:
    """No upper bound: `torchddp build` compiles an extension for a newer torch."""
    (oldest,) = re.findall(r'^torch-range = "(>=[\d.]+),', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return f"torch{oldest}"


def build_parts(torches: list[str], kinds: list[str]) -> list[Path]:
    PARTS_DIR.mkdir(parents=True, exist_ok=True)
    parts = []
    for torch in torches:
        for kind in kinds:
            folder = fetch(torch, cuda=kind == "cuda")
            print(f"wheel: torch {torch}, {kind}", flush=True)
            with tempfile.TemporaryDirectory(dir=PARTS_DIR) as dist_dir:
                command = [sys.executable, "-m", "scripts.build_wheel", "--kind", kind, "--dist-dir", dist_dir]
                run(command, os.environ | {"PYTHONPATH": str(folder)})
                (built,) = Path(dist_dir).glob("*.whl")
                parts.append(built.replace(PARTS_DIR / built.name))
    return parts


def join(parts: list[Path], dist_dir: Path) -> Path:
    """The wheel of all parts. Their other files must be the same."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [unpacked(part, Path(scratch) / str(number)) for number, part in enumerate(parts)]
        whole = folders[0]
        for other in folders[1:]:
            merge(other, whole)
        (info,) = whole.glob("*.dist-info")
        version = info.name.removeprefix("torchddp-").partition("+")[0]
        make_plain(info / "METADATA", version)
        info.rename(whole / f"torchddp-{version}.dist-info")
        dist_dir.mkdir(parents=True, exist_ok=True)
        # Writes RECORD anew. The name of the file comes from the metadata.
        run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(dist_dir), str(whole)], dict(os.environ))
        return next(dist_dir.glob(f"torchddp-{version}-{PYTHON_TAG}-*.whl"))


def unpacked(part: Path, folder: Path) -> Path:
    with zipfile.ZipFile(part) as archive:
        archive.extractall(folder)
    return folder


def merge(other: Path, whole: Path) -> None:
    for path in sorted((other / "torchddp").rglob("*")):
        target = whole / path.relative_to(other)
        if path.name.startswith("_C-torch"):
            if target.exists():
                sys.exit(f"wheel: two parts have {path.name}")
            shutil.copy2(path, target)
        elif path.is_file() and (not target.exists() or path.read_bytes() != target.read_bytes()):
            sys.exit(f"wheel: {path.relative_to(other)} is not the same in all parts: build them anew")


def make_plain(metadata: Path, version: str) -> None:
    text, changed = metadata.read_text(), 0
    lines = {r"Version: .*": f"Version: {version}", r"Requires-Dist: torch==[^;\n]*": f"Requires-Dist: {requirement()}"}
    for pattern, line in lines.items():
        text, count = re.subn(f"^{pattern}$", line, text, flags=re.MULTILINE)
        changed += count
    if changed != len(lines):
        sys.exit(f"wheel: {changed} lines of the metadata changed instead of {len(lines)}")
    metadata.write_text(text)


def joined_problems(wheel: Path, parts: int) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        found = extensions(archive)
        problems = content_problems(archive.namelist()) + tag_problems(wheel.name, PLATFORM)
        problems += metadata_problems(read_metadata(archive), requirement())
        if len(found) != parts:
            problems.append(f"{parts} parts, but {len(found)} extensions")
        of_cuda = {name for name, (_, kind) in found.items() if kind != "cpu"}
        size = sum(info.compress_size for info in archive.infolist() if info.filename not in of_cuda) / 1e6
        if size > MAX_CPU_MB:
            problems.append(f"without CUDA {size:.1f} MB, more than {MAX_CPU_MB}")
        for name, (torch, kind) in sorted(found.items(), key=lambda item: item[1]):
            print(f"  torch {torch} {kind:6} {archive.getinfo(name).compress_size / 1e6:5.1f} MB")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=Path)
    parser.add_argument("--torches", nargs="+", default=[], help="versions to build parts for")
    parser.add_argument(
        "--kinds", nargs="+", choices=("cpu", "cuda"), help="default: cpu, and cuda where there is an nvcc"
    )
    parser.add_argument("--dist-dir", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    kinds = args.kinds or ["cpu", *(["cuda"] if shutil.which("nvcc") else [])]
    parts = [*args.parts, *build_parts(args.torches, kinds)]
    if not parts:
        parser.error("name wheels to join, or --torches to build them for")
    wheel = join(parts, args.dist_dir.resolve())
    report(wheel, joined_problems(wheel, len(parts)))


if __name__ == "__main__":
    main()
