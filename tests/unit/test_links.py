"""`python -m benchmarks.links`: what is claimed of planned buckets and of predictions, from made-up steps."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.links import cli
from benchmarks.links.field import CASE, LOCALHOST, PLANNED, make_field
from benchmarks.links.plot import save_links
from benchmarks.links.report import render
from benchmarks.links.results import PAYLOAD_SHARE, place_result, predictions
from tests.simulated import make_profile, with_host
from torchddp.harness.machine import describe_machine
from torchddp.plan.step_profile import LinearCost

MBIT, GBIT = 10**6, 10**9
VARIANTS = make_field((1, 25))


def raw(step_ms: dict[str, float], rounds: int = 9) -> dict[str, Any]:
    """Steps without noise."""
    steps = np.array([[step_ms.get(variant.name, 50.0)] * rounds for variant in VARIANTS])
    return {
        "model": "toy",
        "title": "toy model",
        "parameters": 3,
        "gradient_bytes": 12_000_000,
        "transport": "c10d",
        "planned_bytes": [4_000_000, 8_000_000],
        "profile": make_profile(device="cpu"),
        "step_ms": steps,
    }


def test_the_planned_buckets_stand_last_and_are_not_part_of_the_sweep() -> None:
    assert VARIANTS[-1].name == PLANNED
    result = place_result("1 Gbit/s", VARIANTS, raw({PLANNED: 40.0, "torchddp, cap 1": 44.0, "torch default": 80.0}))
    assert result["best_of_sweep"] == "torchddp, cap 1"
    assert result["planned_to_best"]["median"] == pytest.approx(40 / 44)
    assert result["planned_to_torch_default"]["median"] == pytest.approx(0.5)
    assert result["ours_ms"] == 50.0


def test_each_link_is_predicted_from_the_others() -> None:
    profiles, results = {}, []
    for place, rate in (("1 Gbit/s", GBIT), ("100 Mbit/s", 100 * MBIT), (LOCALHOST, None)):
        profile = make_profile(device="cpu", cost=LinearCost(0.0, 1e-9 if rate is None else 8 / rate / PAYLOAD_SHARE))
        profiles[place, "toy"] = with_host(profile, 1e-10)
        # As slow as the link makes it: 10 ms of forward, the first gradient at once, and then 12 MB.
        results.append({**place_result(place, VARIANTS, raw({})), "ours_ms": 100.0})
    rows = predictions(results, profiles, {"1 Gbit/s": GBIT, "100 Mbit/s": 100 * MBIT})
    assert [(row["recorded_over"], row["predicted_for"]) for row in rows] == [
        ("100 Mbit/s", "1 Gbit/s"),
        ("1 Gbit/s", "100 Mbit/s"),
    ]
    fast, slow = (row["predicted_ms"] for row in rows)
    assert slow > 5 * fast
    assert rows[0]["error"] == pytest.approx(fast / 100.0 - 1)


def document() -> dict[str, Any]:
    result = place_result("1 Gbit/s", VARIANTS, raw({PLANNED: 40.0}))
    row = {
        "model": "toy",
        "recorded_over": "10 Gbit/s",
        "predicted_for": "100 Mbit/s",
        "predicted_ms": 90.0,
        "measured_ms": 100.0,
        "error": -0.1,
    }
    return {
        "command": "python -m benchmarks.links",
        "machine": describe_machine(),
        "results": [result],
        "predictions": [row, {**row, "error": 0.3}],
    }


def test_the_report_fits_80_columns_and_says_what_missed() -> None:
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=True, color_system="standard").print(render(document()))
    shown = stream.getvalue()
    assert "\x1b[32m -10%" in shown and "\x1b[31m +30%" in shown
    plain = io.StringIO()
    Console(file=plain, width=80).print(render(document()))
    assert max(map(len, plain.getvalue().splitlines())) <= 80
    assert all(variant.name in plain.getvalue() for variant in VARIANTS)


def test_the_plot_has_a_panel_for_each(tmp_path: Path) -> None:
    results = [document()["results"][0]] * 5
    save_links(results, tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nothing"], "There is no model 'nothing'"),
        (["--rate", "fast"], "--rate wants"),
        (["--seconds", "0"], "--seconds"),
        (["--caps", "x"], "--caps wants"),
        (["--json", "/nowhere/x.json"], "folder '/nowhere' does not exist"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_every_model_of_the_case_exists() -> None:
    from torchddp.harness.command import MODEL_NAMES

    assert set(CASE.models) <= set(MODEL_NAMES)
