"""Records when, on which machine and with which versions results were made."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torchddp

# The root of the checkout, if this file is in one; the folder above an installed package means nothing.
ROOT = Path(__file__).resolve().parents[2]


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return " ".join(found[1].split())
    return platform.processor() or platform.machine()


def available_cores() -> int:
    return len(os.sched_getaffinity(0))


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    if not (ROOT / "csrc").is_dir():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_machine() -> dict[str, Any]:
    """The machine, versions and commit, and the load average, because a busy machine explains a wide spread."""
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "torchddp": torchddp.__version__,  # a checkout's metadata may be that of an older build
        # A copy of the tree without git history gets the commit from its environment.
        "git_commit": _git("rev-parse", "HEAD") or os.environ.get("TORCHDDP_COMMIT") or None,
        "git_dirty": None if status is None else bool(status),
    }


def machine_slug(machine: dict[str, Any]) -> str:
    """A file name part such as 'intel-xeon-processor-2c', or 'nvidia-h200' for what ran on a GPU."""
    gpu = machine.get("gpu")
    name = re.sub(r"\((?:r|tm)\)", "", (gpu["name"] if gpu else machine["cpu"]).lower())
    name = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return name if gpu else f"{name}-{machine['cores']}c"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def date_text(date: str) -> str:
    """'2026-11-24 15:30 UTC', for a date from `now`."""
    return f"{datetime.datetime.fromisoformat(date):%Y-%m-%d %H:%M} UTC"


# Of the JSON of all commands. 3: one envelope for all of them.
FORMAT = 3


def new_document(kind: str, command: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": f"torchddp {kind}",
        "date": now(),
        "command": command,
        "machine": describe_machine(),
        "settings": settings,
        "verdict": "",
        "results": [],
        "failures": [],
    }


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
