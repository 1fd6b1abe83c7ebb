"""The files of `torchddp bench`, the committed results, and the chart in the README."""

import json
from pathlib import Path

import pytest

from benchmarks import pages, summary
from tests.programs import python
from torchddp.harness.variants import TORCH_DDP


@pytest.mark.thorough
@pytest.mark.timeout(330)
def test_torchddp_bench_finds_a_model_in_the_current_folder_and_writes_its_files(tmp_path: Path) -> None:
    code = "import torch\n\ndef make():\n    return torch.nn.Linear(8, 2), torch.ones(3, 8)\n"
    (tmp_path / "mine.py").write_text(code)
    arguments = ["--case", "step_time", "--model", "mine:make", "--seconds", "0.1", "--quick", "--ours", TORCH_DDP]
    done = python("-m", "torchddp", "bench", *arguments, "--out", "kept", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step_time · mine:make: 2 parameters" in done.stdout and "under test default" in done.stdout
    kept, picture = sorted((tmp_path / "kept").iterdir())
    assert json.loads(kept.read_text())["command"].startswith("torchddp bench --case step_time --model mine:make")
    assert picture.suffix == ".png" and picture.read_bytes().startswith(b"\x89PNG")


RESULTS = Path(summary.__file__).parent / "results"


def test_distributions_are_summarized_as_quartiles():
    step_ms = {"median": 12.3456, "q25": 11.1111, "q75": 13.5, "p99": 99.0}
    raw = {"date": "2026-11-22", "rounds": 12345, "peer": None, "step_ms": step_ms, "curve": [1.0, 2.0]}
    assert summary.summarized(raw) == {"date": "2026-11-22", "rounds": 12345, "step_ms": [11.1, 12.3, 13.5]}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_summaries(path):
    result = json.loads(path.read_text())
    assert {"date", "command", "machine", "results"} <= result.keys()
    assert path.stat().st_size < 20_000 and summary.summarized(result) == result


def test_the_readmes_chart_shows_the_newest_result():
    axis = pages.chart().axes[0]
    result = json.loads(max(RESULTS.glob("*-exposed-*.json")).read_text())
    assert [label.get_text() for label in axis.get_yticklabels()] == [model["title"] for model in result["results"]]
    ours = [row["cost"][1] for model in result["results"] for row in model["variants"] if row["name"] == pages.OURS]
    assert [bar.get_width() for bar in axis.patches][-len(ours) :] == ours and len(axis.patches) == 3 * len(ours)
    readme = (pages.DOCS.parent / "README.md").read_text()
    assert f"docs/images/{pages.CHART.name}" in readme and pages.CHART.exists()
