"""The page of a trace in a real browser, from 400 to 1,400 pixels wide; skipped without one."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_profiler import MS, NAMES, FakeEvent
from torchddp.profiler.page import page
from torchddp.profiler.ranks import Clock, MergedProfile, RankRecord, merge
from torchddp.profiler.steps import BucketLayout, read_steps

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LAYOUT = tuple(BucketLayout((index % 4,), 4_000_000) for index in range(20))
# Runs last in the page, and sends what it found to the page around it.
PROBE = """<script>addEventListener("load", () => {
  const [range, lanes, detail] = [".range", ".lanes", ".detail"].map(name => document.querySelector(name));
  const found = { load_ms: performance.now(), width: innerWidth, needed: document.documentElement.scrollWidth };
  lanes.querySelector('[tabindex="0"]').focus();
  for (let row = 0; row < 3; row++)
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
  document.activeElement.dispatchEvent(new FocusEvent("focus")); // a page that is in the background gets no such event
  found.detail = detail.textContent;
  found.stops = lanes.querySelectorAll('[tabindex="0"]').length;
  found.lanes = [...lanes.querySelectorAll("h3")].map(node => node.textContent);
  range.stepUp();
  range.dispatchEvent(new Event("input"));
  found.title = document.querySelector(".title").textContent;
  found.headline = document.querySelector(".headline").innerText;
  found.loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  found.background = getComputedStyle(document.body).backgroundColor;
  parent.postMessage(JSON.stringify(found), "*");
});</script></html>"""
# A window is at least 500 pixels wide, a frame is not.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body></body><script>
  onmessage = event => document.body.textContent = event.data;
  document.body.innerHTML = `<iframe src="page.html" width="WIDTH" height="900" style="border: 0"></iframe>`;
</script>"""


def many_steps(steps: int, ranks: int) -> MergedProfile:
    records = []
    for rank in range(ranks):
        found = []
        for index in range(1, steps + 1):
            events = [("forward_begin", index, 0.0), ("backward_begin", index, 4.0)]
            for bucket in range(len(LAYOUT)):
                ready = 5.0 + bucket + 0.1 * ((rank + index) % 7)
                events += [("grad_ready", bucket % 4, ready), ("packed", bucket, ready + 0.1)]
                events += [("launched", bucket, ready + 0.2)]
            for bucket in range(len(LAYOUT)):
                events += [("wait_begin", bucket, 26.0 + bucket / 9), ("done", bucket, 26.1 + bucket / 9)]
            events.append(("backward_end", index, 30.0))
            times = [FakeEvent(kind, number, round((100 * index + at) * MS)) for kind, number, at in events]
            found += read_steps(times, lambda _: LAYOUT).complete
        records.append(RankRecord(rank, "host", "clock", NAMES, tuple(found)))
    return merge(records, [Clock()] * ranks)


def opened(folder: Path, markup: str, width: int, *options: str) -> dict[str, Any]:
    assert BROWSER is not None
    (folder / "page.html").write_text(markup.replace("</html>", PROBE))
    outer = folder / "outer.html"
    outer.write_text(FRAME.replace("WIDTH", str(width)))
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1500,1000",
        *options,
        "--dump-dom",
        f"file://{outer}",
    )
    done = subprocess.run([BROWSER, *flags], capture_output=True, text=True, timeout=120, check=True)
    body = re.search(r"<body>(\{.*\})</body>", done.stdout, re.DOTALL)
    assert body is not None, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(body[1])
    return found


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_page_of_200_steps_and_8_ranks_opens_quickly_at_any_width(tmp_path: Path) -> None:
    profile = many_steps(200, 8)
    markup = page("torchddp trace: <b>own</b> & co", "A verdict.", [("", profile)], ["made here"])
    assert "Times are in ms" in markup
    assert len(markup) < 6_000_000 and "http:" not in markup and "https:" not in markup and "src=" not in markup
    for width, options in ((400, ()), (1400, ("--blink-settings=preferredColorScheme=0",))):
        found = opened(tmp_path, markup, width, *options)
        assert found["width"] == width and found["needed"] <= width, found
        assert found["load_ms"] < 10_000, found  # about 500 on an idle machine
        assert found["loaded"] == [] and found["stops"] == 1
        assert [lane[:6] for lane in found["lanes"]] == [f"rank {rank}" for rank in range(8)]
        assert sum(lane.endswith(", the slowest") for lane in found["lanes"]) == 1
        assert found["detail"].startswith("rank 0, bucket 2, 4 MB: "), found
        assert (
            "queued" in found["detail"] and "launched it last" in found["detail"] and "held back by" in found["detail"]
        )
        middle = profile.median_step().index
        assert found["title"] == f"Step {middle + 1}" and "= forward" in found["headline"], found
        assert (found["background"] == "rgb(255, 255, 255)") is (width == 400)
