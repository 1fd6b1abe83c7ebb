"""The report in a browser: its tables are there and its pictures decode. Skipped where there is no Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from tests.unit.benchmark_results import document, exposed, overlap, scaling, startup, step_time
from torchddp.bench.registry import CASES
from torchddp.bench.report import write_report
from torchddp.harness.page import page_table

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,1600",
]
# Only in the copy that is tested: what the browser made of the page, as text it dumps.
PROBE = """
<script>
addEventListener("load", () => {
  const images = [...document.images].map((image) => image.naturalWidth);
  const rows = [...document.querySelectorAll("tr")].map((row) => [...row.cells].map((cell) => cell.textContent));
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = JSON.stringify({images, rows, wide: document.documentElement.scrollWidth > innerWidth});
  document.body.append(seen);
});
</script>
"""


def browse(page: Path, folder: Path, *arguments: str) -> str:
    """What Chromium prints for a page."""
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [str(CHROMIUM), *FLAGS, profile, *arguments, page.as_uri()], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def probe(page: str, folder: Path) -> dict[str, Any]:
    """Rows and widths of images in a page, as the browser sees them."""
    path = folder / "probed.html"
    path.write_text(page.replace("</body>", f"{PROBE}</body>"))
    found = re.search(r'<pre id="seen">(.*?)</pre>', browse(path, folder, "--dump-dom"), re.DOTALL)
    assert found, "the page's load event did not fire"
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


def problems(seen: dict[str, Any], results: list[dict[str, Any]]) -> list[str]:
    """What is missing in the page of these results."""
    found = [f"image {index} does not decode" for index, width in enumerate(seen["images"]) if width == 0]
    if len(seen["images"]) != len(results):
        found.append(f"{len(seen['images'])} images for {len(results)} cases")
    for result in results:
        rows = page_table(CASES[result["case"]].table(result)).rows
        found += [f"no row {row} of {result['case']}" for row in rows if list(row) not in seen["rows"]]
    return found + (["the page is wider than the window"] if seen["wide"] else [])


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return [step_time(), overlap(), startup(), scaling(), exposed()]


@pytest.fixture(scope="module")
def page(results: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(document(*results), path)
    return path.read_text()


@pytest.mark.thorough
def test_the_browser_sees_every_table_and_picture(page: str, results: list[dict[str, Any]], tmp_path: Path) -> None:
    assert problems(probe(page, tmp_path), results) == []


def test_a_broken_picture_and_a_lost_row_would_be_seen(
    page: str, results: list[dict[str, Any]], tmp_path: Path
) -> None:
    broken = page.replace("data:image/png;base64,iVBOR", "data:image/png;base64,AAAAA", 1).replace("no DDP", "?")
    found = problems(probe(broken, tmp_path), results)
    assert "image 0 does not decode" in found and any("no DDP" in problem for problem in found)
    assert not any("image 1" in problem for problem in found)


def test_a_screenshot_is_not_blank(page: str, tmp_path: Path) -> None:
    path, picture = tmp_path / "report.html", tmp_path / "shot.png"
    path.write_text(page)
    browse(path, tmp_path, f"--screenshot={picture}")
    pixels = np.asarray(image.imread(picture))[..., :3]
    assert pixels.shape[1] == 1200
    assert pixels.std() > 0.05  # of 0 to 1; an empty page has one colour
