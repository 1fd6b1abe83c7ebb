"""The HTML report of `torchddp bench`, the committed results, and the chart in the README."""

import base64
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import readme_chart, summary
from tests.unit.benchmark_results import document, exposed, overlap, scaling, startup, step_time
from torchddp.bench.gradients import summary_table
from torchddp.bench.registry import CASES
from torchddp.bench.report import write_report
from torchddp.harness.page import page_table
from torchddp.harness.variants import TORCH_DDP

PNG = b"\x89PNG\r\n\x1a\n"


def rows_of(page: str) -> list[list[str]]:
    """The cells of every row of every table."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row)] for row in rows]


def pictures_of(page: str) -> list[bytes]:
    found = re.findall(r'<img alt="[^"]+" src="data:image/png;base64,([^"]+)"', page)
    return [base64.b64decode(data) for data in found]


def test_the_html_report_has_every_row_and_a_plot_of_each_case(tmp_path: Path) -> None:
    results = [step_time(), overlap(), startup(), scaling(), exposed()]
    run, path = document(*results, quick=True), tmp_path / "report.html"
    write_report(run, path)
    page = path.read_text()
    rows = rows_of(page)
    for result in results:
        table = page_table(CASES[result["case"]].table(result))
        assert len(table.rows) >= 4
        for row in (table.headings, *table.rows):
            assert list(row) in rows
    for row in page_table(summary_table(results[4:])).rows:
        assert list(row) in rows
    pictures = pictures_of(page)
    assert len(pictures) == page.count("<img") == 5
    assert all(picture.startswith(PNG) for picture in pictures) and len(set(pictures)) == 5
    machine = run["machine"]
    for words in (machine["cpu"], machine["torch"], machine["python"], machine["git_commit"][:12], run["command"]):
        assert words in html.unescape(page)
    assert "--quick is a smoke test" in page and "* more ranks than cores" in page
    assert not re.search(r'(?:src|href)="(?!data:)', page) and "url(" not in page  # it loads no other file
    kept = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert kept and json.loads(kept[1]) == run


@pytest.mark.thorough
def test_torchddp_bench_finds_a_model_in_the_current_folder_and_writes_a_page(tmp_path: Path) -> None:
    code = "import torch\n\ndef make():\n    return torch.nn.Linear(8, 2), torch.ones(3, 8)\n"
    (tmp_path / "mine.py").write_text(code)
    arguments = ["--case", "step_time", "--model", "mine:make", "--seconds", "0.1", "--quick", "--ours", TORCH_DDP]
    program = [sys.executable, "-m", "torchddp", "bench", *arguments, "--html", "report.html", "--out", "kept"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "step_time · mine:make: 2 parameters" in done.stdout and "wrote report.html" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert any(row and row[0] == "under test default" for row in rows_of(page))
    assert [picture[:8] for picture in pictures_of(page)] == [PNG]
    assert "torchddp bench --case step_time --model mine:make" in page
    assert sorted(path.suffix for path in (tmp_path / "kept").iterdir()) == [".json", ".png"]


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
    result = json.loads(max(RESULTS.glob("*-exposed-*.json")).read_text())
    added = readme_chart.added_ms(result)
    assert len(added) == 4 and all(len(times) == 3 for times in added.values())
    axis = readme_chart.drawn(added).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == list(added)
    assert [bar.get_width() for bar in axis.patches] == [times[kind] for kind in range(3) for times in added.values()]
    readme = (readme_chart.CHART.parents[2] / "README.md").read_text()
    assert f"docs/images/{readme_chart.CHART.name}" in readme and readme_chart.CHART.exists()
