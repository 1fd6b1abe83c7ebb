"""Committed benchmark results, and the README's chart of them."""

import json
from pathlib import Path

import pytest

from benchmarks import readme_chart, summary

RESULTS = Path(summary.__file__).parent / "results"


def test_distributions_become_quartiles():
    raw = {
        "date": "2026-11-22",
        "rounds": 12345,
        "peer": None,
        "step_ms": {"median": 12.3456, "q25": 11.1111, "q75": 13.5, "p99": 99.0},
        "curve": [1.0, 2.0],
    }
    assert summary.summarized(raw) == {"date": "2026-11-22", "rounds": 12345, "step_ms": [11.1, 12.3, 13.5]}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_summaries(path):
    result = json.loads(path.read_text())
    assert {"date", "command", "machine", "results"} <= result.keys()
    assert path.stat().st_size < 20_000 and summary.summarized(result) == result


def test_the_readme_shows_the_newest_result():
    result = json.loads(max(RESULTS.glob("*-exposed-*.json")).read_text())
    added = readme_chart.added_ms(result)
    assert len(added) == 4 and all(len(times) == 3 for times in added.values())
    axis = readme_chart.drawn(added).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == list(added)
    assert [bar.get_width() for bar in axis.patches] == [times[kind] for kind in range(3) for times in added.values()]
    readme = (readme_chart.CHART.parents[2] / "README.md").read_text()
    assert f"docs/images/{readme_chart.CHART.name}" in readme and readme_chart.CHART.exists()
