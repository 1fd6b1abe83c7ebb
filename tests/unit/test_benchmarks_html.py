"""The HTML report of the benchmark, and the command behind both doors."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmark_results import document, exposed, overlap, scaling, startup, step_time
from torchddp.bench.gradients import summary_table
from torchddp.bench.registry import CASES
from torchddp.bench.report import write_report
from torchddp.harness.page import page_table
from torchddp.harness.variants import TORCH_DDP, ArgumentError, load_class

PNG = b"\x89PNG\r\n\x1a\n"


def rows_of(page: str) -> list[list[str]]:
    """The cells of every row of every table."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row)] for row in rows]


def pictures_of(page: str) -> list[bytes]:
    return [
        base64.b64decode(data) for data in re.findall(r'<img alt="[^"]+" src="data:image/png;base64,([^"]+)"', page)
    ]


def test_a_table_of_the_page_is_that_of_the_terminal() -> None:
    table = page_table(CASES["scaling"].table(scaling()))
    assert table.headings[:5] == ["ranks", "variant", "step p50 ms", "step p90", "efficiency"]
    assert table.rows[0][:3] == ["1", "no DDP", "10.0"]
    assert table.rows[11][1:5] == ["torchddp default", "24.0", "24.0", "42%"]
    assert table.marked == {3, 7, 11}


def test_the_page_holds_every_row_and_a_picture_of_each_case(tmp_path: Path) -> None:
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
    kept = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert kept and json.loads(kept[1]) == run


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    write_report(document(step_time()), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!data:)', page) and "<link" not in page and "url(" not in page


# --- both doors ------------------------------------------------------------------------------------------------------


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`torchddp ...` in a process of its own."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "torchddp", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd or root,
        env=environment,
    )


@pytest.mark.thorough
def test_torchddp_bench_finds_a_model_beside_it_and_writes_a_page(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Linear(8, 2), torch.ones(3, 8)\n"
    )
    arguments = ["--case", "step_time", "--model", "mine:make", "--seconds", "0.1", "--quick", "--ours", TORCH_DDP]
    done = command("bench", *arguments, "--html", "report.html", "--out", "kept", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step_time · mine:make: 2 parameters" in done.stdout and "wrote report.html" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert any(row and row[0] == "under test default" for row in rows_of(page))
    assert [picture[:8] for picture in pictures_of(page)] == [PNG]
    assert "torchddp bench --case step_time --model mine:make" in page
    assert sorted(path.suffix for path in (tmp_path / "kept").iterdir()) == [".json", ".png"]


def test_torchddp_bench_says_what_it_can_do() -> None:
    listed, described = command("--help"), command("bench", "--help")
    assert re.search(r"^\s+bench\s+Time DDP classes", listed.stdout, re.MULTILINE)
    assert described.returncode == 0
    for words in ("torchddp bench --case step_time --model train.py:make", "--html", "--world-sizes"):
        assert words in described.stdout


@pytest.mark.thorough
def test_a_mistake_at_torchddp_bench_is_one_sentence() -> None:
    done = command("bench", "--case", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: There is no case 'nope'") and done.stderr.count("\n") == 1
    unknown = command("bench", "--bogus")
    assert unknown.returncode == 2 and unknown.stderr.endswith("see torchddp bench --help.\n")


@pytest.mark.thorough
def test_the_command_starts_where_numpy_is_missing() -> None:
    code = "import sys; sys.modules['numpy'] = None; sys.argv = ['torchddp', '--help']\n"
    code += "from torchddp.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr


def test_a_class_whose_package_does_not_load_leads_to_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        import_error: Any = ImportError("no libtorch")

    monkeypatch.setitem(sys.modules, "torchddp", Broken)
    with pytest.raises(ArgumentError, match=r"does not load here; `torchddp doctor` says why\."):
        load_class("torchddp.DistributedDataParallel")
