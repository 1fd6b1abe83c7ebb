"""A dry run of tests/gpu/run.sh with another Python and torch, from a copy of the checkout.

The copy, build/dry-run, holds all files that git does not ignore, with their mtimes, so that a second run compiles only
what has changed; the checkout's own extension is not touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "dry-run"
# Shared out as on a machine with a GPU and many cores; on two busy ones, the build's share must last for ten minutes.
LIMIT_S = 6000


def copy_checkout(source: Path, target: Path) -> None:
    """Copies the files of `source` that git does not ignore to `target`; build outputs there stay."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=source, check=True, capture_output=True, text=True).stdout.split("\0")
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.name != "build":
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    for name in filter(None, names):
        if (source / name).is_file():  # git also lists deleted files
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter whose torch is used")
    args = parser.parse_args()
    copy_checkout(ROOT, COPY)
    # No inherited path may lead back to the checkout.
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OUT")}
    variables |= {"PYTHON": os.path.abspath(args.python), "RUN_LIMIT_S": str(LIMIT_S)}
    sys.exit(subprocess.run([COPY / "tests" / "gpu" / "run.sh", "--dry-run"], env=variables).returncode)


if __name__ == "__main__":
    main()
