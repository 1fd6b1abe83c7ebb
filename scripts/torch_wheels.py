"""Fetches what is needed of a torch to compile for it: headers, libraries and Python sources, extracted from its wheel.
Installing a CUDA build with all that it requires would take 5 GB.

`python -m scripts.torch_wheels 2.14.1` prints the folder, build/torch/2.14.1-cp311; put it on PYTHONPATH to compile for
that torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "torch"
PYTHON_TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
LIBRARIES = r"torch/lib/lib(c10|c10_cuda|torch|torch_cpu|torch_cuda|torch_python|gomp)\b[^/]*"
WANTED = rf"torch/(include/|.*\.pyi?$)|{LIBRARIES}|torch-[^/]+\.dist-info/METADATA$"
CUDA = re.compile(r"^cuda\b[^=]*= '(\d+)\.(\d+)", re.MULTILINE)


def fetch(torch: str, cuda: bool = False) -> Path:
    """The folder of this torch, a CUDA build if asked, otherwise the build that pip prefers. A complete one is kept."""
    folder = FOLDER / f"{torch}-{PYTHON_TAG}"
    _fetch(f"torch=={torch}", folder)
    if cuda and not cuda_version(folder):
        folder = FOLDER / f"{torch}-cuda-{PYTHON_TAG}"
        _fetch(f"torch==={torch}", folder)  # without a local version, where pip prefers 2.13.0+cpu
        if not cuda_version(folder):
            sys.exit(f"torch_wheels: torch {torch} of this index is a CPU build")
    return folder


def cuda_version(folder: Path) -> str:
    """ "13.0", or "" for a CPU build."""
    found = CUDA.search((folder / "torch" / "version.py").read_text())
    return ".".join(found.groups()) if found else ""


def _fetch(requirement: str, folder: Path) -> None:
    complete = folder / "complete"
    if complete.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    print(f"torch_wheels: fetching {requirement}", file=sys.stderr, flush=True)
    metadata = extract(requirement, WANTED, folder)
    if found := re.search(r"^Requires-Dist: (nvidia-nccl-cu\d+==[\d.]+)", metadata, re.MULTILINE):
        extract(found[1], r"nvidia/nccl/(include|lib)/", folder)
    if cuda := cuda_version(folder):
        major = cuda.partition(".")[0]
        runtime = "nvidia-cuda-runtime" + ("-cu12" if major == "12" else "")
        extract(f"{runtime}=={cuda}.*", r"nvidia/[^/]+/lib/libcudart", folder)
    complete.touch()


def extract(requirement: str, wanted: str, folder: Path) -> str:
    """Downloads a wheel, extracts paths that start with the pattern, and returns the wheel's METADATA."""
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", downloads]
        # The machine's constraints apply to installations, but nothing is installed here.
        unconstrained = os.environ | {"PIP_CONSTRAINT": os.devnull}
        done = subprocess.run([*command, requirement], env=unconstrained, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"torch_wheels: pip can't download {requirement}: {done.stderr.strip()}")
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            archive.extractall(folder, [name for name in names if re.match(wanted, name)])
            (metadata,) = [name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            return archive.read(metadata).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="a version, such as 2.14.1")
    parser.add_argument("--cuda", action="store_true", help="a CUDA build, where pip prefers another")
    args = parser.parse_args()
    print(fetch(args.torch, args.cuda))


if __name__ == "__main__":
    main()
