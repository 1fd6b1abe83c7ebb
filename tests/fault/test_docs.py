"""Examples of docs/fault_tolerance.md and docs/hang_reports.md run, and print what the pages say."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness import run_ranks

DOCS = Path(__file__).parents[2] / "docs"


def code_between(page, begin, end):
    """The indented lines, and what follows the end."""
    code, after = (DOCS / page).read_text().split(begin)[1].split(end)[:2]
    lines = [line for line in code.splitlines() if line.startswith("    ") or not line]
    return textwrap.dedent("\n".join(lines)).strip() + "\n", after


def test_the_example_of_fail_together():
    code, _ = code_between("fault_tolerance.md", "## An exception on one rank ends all", "A rank that raises")

    def work(rank):
        names = {}
        exec(code.replace('dist.init_process_group("gloo")\n', ""), names)
        return names["step"], float(names["loss"])

    assert [step for step, _ in run_ranks(work, 2)] == [19, 19]


@pytest.mark.beyond_torch("torch waits in silence")
def test_the_example_of_collectives(tmp_path):
    """Line for line, but for the seconds."""
    code, printed = code_between("hang_reports.md", "## Collectives of the program", "Under `torchrun")
    script = tmp_path / "train.py"
    script.write_text(code)
    promised = next(line.strip() for line in printed.splitlines() if "torchddp hang report" in line)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone", str(script)]
    environment = {**os.environ, "TORCHDDP_HANG_REPORT_DIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    reports = [line for line in done.stderr.splitlines() if line.startswith("torchddp hang report")]
    assert len(reports) == 1, done.stderr
    assert re.sub(r"[\d.]+ s$", "", reports[0]) == re.sub(r"[\d.]+ s$", "", promised)
    assert done.returncode != 0
