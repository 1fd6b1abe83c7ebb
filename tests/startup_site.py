"""A folder like the site-packages of an installed torchddp, for Pythons that are to find nothing but what it starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make_site(folder: Path) -> str:
    """Writes what setup.py has Python read when it starts; returns the PYTHONPATH with which a Python does read it."""
    build = [sys.executable, "setup.py", "-q", "build_startup", "--build-lib", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=100)
    (folder / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(folder)!r})\n")
    return os.pathsep.join([str(folder), str(ROOT)])


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python on the checkout, or on what PYTHONPATH says, with no other variable of ours or of Python's."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHDDP_", "PYTHON"))}
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=110, env=clean | path | environment
    )
