"""Examples of docs/fault_tolerance.md and docs/hang_reports.md run and print what the pages show."""

import os
import re

import pytest

from tests.harness import run_ranks
from tests.pages import code_of
from tests.programs import python


def test_the_example_of_fail_together(tmp_path):
    loop, told, saving = code_of("fault_tolerance.md", "Stop all ranks when one raises").partition(
        "torchddp.PeerFailedError"
    )
    saving = saving.partition("\n")[2]

    def work(rank):
        names = {}
        exec(loop.replace('dist.init_process_group("gloo")\n', ""), names)
        os.chdir(tmp_path)
        exec(saving, names)
        return names["step"], os.listdir()

    assert told and run_ranks(work, 2) == [(19, ["checkpoint.pt"])] * 2


@pytest.mark.slow
@pytest.mark.beyond_torch("torch waits in silence")
def test_the_example_of_collectives(tmp_path):
    """Every line must match, except for seconds."""
    code, _, told = code_of("hang_reports.md", "Collectives of the program").partition("torchddp hang report")
    script = tmp_path / "train.py"
    script.write_text(code.strip())
    promised = "torchddp hang report" + told.splitlines()[0]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone")
    done = python(*torchrun, str(script), TORCHDDP_HANG_REPORT_DIR=str(tmp_path))
    reports = [line for line in done.stderr.splitlines() if line.startswith("torchddp hang report")]
    assert len(reports) == 1, done.stderr
    assert re.sub(r"[\d.]+ s$", "", reports[0]) == re.sub(r"[\d.]+ s$", "", promised)
    assert done.returncode != 0
