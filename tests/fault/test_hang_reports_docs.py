"""The example of docs/hang_reports.md that needs no model prints what the page says."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "hang_reports.md"

pytestmark = pytest.mark.beyond_torch("torch waits in silence")


def test_the_example_of_collectives(tmp_path):
    """Line for line, but for the seconds."""
    section = PAGE.read_text().split("## Collectives of the program")[1]
    code, printed = section.split("Under `torchrun")[:2]
    script = tmp_path / "train.py"
    lines = [line for line in code.splitlines() if line.startswith("    ") or not line]
    script.write_text(textwrap.dedent("\n".join(lines)).strip() + "\n")
    promised = next(line.strip() for line in printed.splitlines() if "torchddp hang report" in line)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone", str(script)]
    environment = {**os.environ, "TORCHDDP_HANG_REPORT_DIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    reports = [line for line in done.stderr.splitlines() if line.startswith("torchddp hang report")]
    assert len(reports) == 1, done.stderr
    assert re.sub(r"[\d.]+ s$", "", reports[0]) == re.sub(r"[\d.]+ s$", "", promised)
    assert done.returncode != 0
