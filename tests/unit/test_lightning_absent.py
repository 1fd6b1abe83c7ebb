"""torchddp without Lightning: nothing of it is imported, and who asks for it is told what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

HIDE = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_import_torchddp_brings_nothing_of_it() -> None:
    program = """
import sys
import torchddp
print([name for name in sys.modules if "lightning" in name or name.startswith("torchddp.integrations.lightning")])
"""
    ended = _run(program)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


def test_without_lightning_one_line_names_the_package() -> None:
    ended = _run(HIDE + "import torchddp.integrations.lightning")
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and last.endswith("pip install lightning"), ended.stderr
