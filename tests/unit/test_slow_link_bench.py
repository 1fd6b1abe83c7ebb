"""`python -m benchmarks.slow_link`: time to a loss, bounds, tables and errors, from made-up races."""

from typing import Any

import pytest

from benchmarks.slow_link.bounds import COMPARISONS, NAMES, judge
from benchmarks.slow_link.curves import Point, arrival, smoothed, target_of
from benchmarks.slow_link.job import TARGET_METHOD
from benchmarks.slow_link.results import race_result
from benchmarks.training.methods import METHODS


def curve(*losses: float, step_s: float = 1.0, slice_steps: int = 5) -> list[Point]:
    """A curve with an evaluation after each slice."""
    return [Point(i * slice_steps, i * slice_steps * step_s, loss) for i, loss in enumerate(losses)]


def test_arrival_is_interpolated_and_needs_more_than_one_evaluation() -> None:
    falling = curve(6.0, 5.0, 4.0, 3.0, 2.0, step_s=2.0)
    assert [arrival(falling, loss) for loss in (4.0, 3.5, 6.0)] == [(10, 20), (12.5, 25), (0, 0)]
    assert target_of(falling) == 3.0
    # Only the last evaluation is at 2.0, which may be noise.
    assert arrival(curve(6.0, 5.0, 4.0, 3.0, 2.0), 2.5) is None
    assert arrival(curve(6.0, 5.0, 4.0, 3.0, 2.0, 1.0), 2.5) == (17.5, 17.5)
    lucky = curve(6.0, 5.0, 1.0, 5.0, 4.0, 3.0, 2.0)
    assert smoothed(lucky) == [6.0, 5.0, 5.0, 4.0, 4.0, 3.0]
    assert arrival(lucky, 3.5) == (22.5, 22.5)
    nan = float("nan")
    assert arrival(curve(6.0, nan, nan, nan, nan), 4.0) is None
    with pytest.raises(ValueError, match="needs 3 evaluations, got 2"):
        target_of(curve(6.0, 5.0))


def test_the_faster_of_each_side_counts() -> None:
    seconds = {"torch-ddp": 130.0, "torch-ddp-5": 120.0, "powersgd": 20.0, "diloco": 10.0}
    (row,) = [row for row in judge(seconds, tuple(seconds)) if row["bound"] == 10.0]
    assert (row["ours"], row["theirs"], row["ratio"], row["holds"]) == ("diloco", "torch-ddp-5", 12.0, True)
    (row,) = [row for row in judge({**seconds, "diloco": 12.1}, tuple(seconds)) if row["bound"] == 10.0]
    assert row["holds"] is False
    # A method that didn't arrive misses its bound; one that didn't run is not judged.
    ran = ("torch-ddp", "exact", "torch-powersgd", "powersgd")
    rows = {row["title"]: row for row in judge({"torch-ddp": 100.0, "powersgd": 50.0}, ran)}
    assert rows["exact / torch DDP"]["holds"] is False and rows["exact / torch DDP"]["ratio"] is None
    # Theirs never arrived, so ours is not slower.
    assert rows["PowerSGD / torch's PowerSGD"]["holds"] is True
    assert "int8 / torch DDP" not in rows


def raced(missing: str = "") -> dict[str, Any]:
    """The result of a race in which all losses fall alike, with shorter steps for later methods."""
    methods: dict[str, Any] = {}
    for index, name in enumerate(NAMES):
        step_s = 2.0 / (index + 1)
        points = [[p.steps, p.seconds, p.loss] for p in curve(6.0, 5.0, 4.0, 3.0, 2.5, step_s=step_s)]
        methods[name] = {"points": points, "step_seconds": [step_s] * 4, "sent_bytes_per_step": [2e7, 1.9e7]}
    if missing:
        methods[missing] = {"error": "ImportError: cannot import name 'averaging' from 'torchddp'"}
    told = {"title": "GPT", "parameters": 9, "unit": "tokens", "units_per_step": 256, "steps": 15, "target": 3.0}
    return race_result({**told, "methods": methods}, {name: METHODS[name].what for name in NAMES})


def test_a_result_has_each_methods_speedup_or_error() -> None:
    result = raced()
    rows = {row["name"]: row for row in result["methods"]}
    assert rows[TARGET_METHOD]["arrival"] == {"steps": 15.0, "seconds": 30.0}
    assert result["best_torch"] == "torch-ddp-5" and rows["torch-ddp-5"]["speedup"] == 1.0
    exact = NAMES.index("exact") + 1
    assert rows["exact"]["speedup"] == pytest.approx(exact / 2)
    assert {row["title"] for row in result["comparisons"]} == {comparison.title for comparison in COMPARISONS}
    result = raced("diloco")
    rows = {row["name"]: row for row in result["methods"]}
    assert "averaging" in rows["diloco"]["error"] and rows["diloco"]["arrival"] is None
    (row,) = [row for row in result["comparisons"] if "DiLoCo" in row["title"]]
    assert row["ours"] == "powersgd"
