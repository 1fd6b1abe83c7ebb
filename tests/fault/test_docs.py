"""The reports that docs/hang_reports.md shows are what its program and torchfrtrace print."""

import re

import pytest

from tests.pages import blocks_of, code_of
from tests.programs import python


@pytest.mark.slow
@pytest.mark.beyond_torch("torch waits in silence")
def test_the_example_of_collectives(tmp_path):
    """Every line must match, except for seconds."""
    script = tmp_path / "train.py"
    script.write_text(code_of("hang_reports.md", "Collectives of the program"))
    promised = blocks_of("hang_reports.md", "Collectives of the program", "text")[0]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone")
    traces = tmp_path / "traces"
    folders = {"TORCHDDP_HANG_REPORT_DIR": str(tmp_path), "TORCHDDP_FLIGHT_RECORDER_DIR": str(traces)}
    done = python(*torchrun, str(script), **folders)
    reports = [line for line in done.stderr.splitlines() if line.startswith("torchddp hang report")]
    assert len(reports) == 1, done.stderr
    assert re.sub(r"[\d.]+ s$", "", reports[0]) == re.sub(r"[\d.]+ s$", "", promised)
    assert done.returncode != 0
    printed = python("-m", "torch.distributed.flight_recorder.fr_trace", str(*traces.iterdir())).stderr
    promised, _, _ = blocks_of("hang_reports.md", "For torch's analyzer", "text")[0].partition("collective stack trace")
    assert promised in printed
