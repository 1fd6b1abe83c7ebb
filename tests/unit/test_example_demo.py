"""The demo without training: figures, comparison of losses, exit codes, and child processes that never outlive it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from examples import demo
from examples.gpt import metrics, processes
from examples.gpt.comparison import LOSS_TOLERANCE, compare_losses, merge_segments, plot_losses, result_table
from examples.gpt.errors import ExampleError

# --- figures and comparison ------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert metrics.percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), abs=1e-6)


def _record(losses: list[float], first_step: int = 1, step_ms: float = 10.0, ddp: str = "torch") -> dict[str, Any]:
    numbered = list(enumerate(losses, start=first_step))
    return {
        "config": {"ddp": ddp},
        "world_size": 2,
        "device": "cpu",
        "parameters": 1_300_000,
        "data": {},
        "versions": {},
        "first_step": first_step,
        "steps": [{"step": n, "loss": v, "step_ms": step_ms + n, "probed": n % 5 == 0} for n, v in numbered],
        "validation": [{"step": numbered[-1][0], "loss": losses[-1] + 0.25}],
        "communication": [{"step": n, "exposed_ms": float(n)} for n, _ in numbered if n % 5 == 0],
        "memory": {"training_peak_rss_bytes": 1e8 + first_step, "peak_rss_bytes": 2e8},
    }


def test_step_times_leave_out_warm_up_and_probed_steps() -> None:
    summary = metrics.summarise([_record([1.0] * 8)])
    assert summary["step_ms_p50"] == 16.5  # steps 4, 6, 7, 8
    summary = metrics.summarise([_record([1.0] * 9)])
    assert summary["step_ms_p50"] == 17.0  # steps 4, 6, 7, 8, 9
    assert summary["exposed_communication_ms_p50"] == 5.0


def test_too_short_a_run_has_no_step_time_instead_of_a_wrong_one() -> None:
    summary = metrics.summarise([_record([1.0] * 2)])
    assert summary["step_ms_p50"] is None and summary["exposed_communication_ms_p50"] is None


def test_segments_are_joined_in_order_of_steps() -> None:
    merged = merge_segments([_record([3.0, 2.0], first_step=11), _record([5.0] * 10)])
    assert [entry["step"] for entry in merged["steps"]] == list(range(1, 13))
    assert [entry["step"] for entry in merged["validation"]] == [10, 12]
    assert merged["summary"]["final_train_loss"] == 2.0
    assert merged["summary"]["final_validation_loss"] == 2.25
    assert merged["summary"]["peak_rss_bytes"] == 1e8 + 11


def test_same_losses_are_bitwise_equal() -> None:
    comparison = compare_losses(_record([3.0, 2.0, 1.0]), _record([3.0, 2.0, 1.0]))
    assert comparison.equal and comparison.bitwise_equal
    assert comparison.words() == "All 4 losses are bitwise equal."


def test_one_rounding_apart_is_equal_but_not_called_bitwise() -> None:
    comparison = compare_losses(_record([3.0, 2.0, 1.0]), _record([3.0, math.nextafter(2.0, 3.0), 1.0]))
    assert comparison.equal and not comparison.bitwise_equal
    assert "within the tolerance" in comparison.words()
    assert "training step 2" in comparison.words()


@pytest.mark.parametrize(
    "other",
    [[3.0, 2.0 + 3 * LOSS_TOLERANCE, 1.0], [3.0, 2.0], [3.0, 2.0, 1.0, 1.0], [3.0, math.nan, 1.0]],
    ids=["too far", "a step less", "a step more", "not a number"],
)
def test_different_losses_are_different(other: list[float]) -> None:
    comparison = compare_losses(_record([3.0, 2.0, 1.0]), _record(other))
    assert not comparison.equal
    assert "MORE THAN the tolerance" in comparison.words()


def test_two_runs_that_both_diverged_or_have_no_losses_are_not_equal() -> None:
    assert not compare_losses(_record([math.nan]), _record([math.nan])).equal
    nothing = {"steps": [], "validation": []}
    assert not compare_losses(nothing, nothing).equal


def test_the_table_fits_80_columns_with_large_figures() -> None:
    record = merge_segments([_record([12345.678] * 9, step_ms=123456.7)])
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(result_table({"torch": record, "torchddp": record}, "GPT"))
    lines = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert any("torchddp" in line and "12345.6780" in line and "123463.7" in line for line in lines)


def test_the_picture_shows_both_curves(tmp_path: Path) -> None:
    from matplotlib import image

    record = merge_segments([_record([5.0, 4.0, 3.0, 2.5])])
    plot_losses({"torch": record, "torchddp": record}, tmp_path / "loss.png", "title")
    pixels = image.imread(tmp_path / "loss.png")[..., :3]
    for colour in ((0xF2, 0xA6, 0x5A), (0x1B, 0x3A, 0x5C)):
        near = numpy.abs(pixels - numpy.array(colour) / 255).max(axis=-1) < 0.02
        assert near.sum() > 200, colour  # equal curves lie on each other, and neither hides the other


# --- demo ------------------------------------------------------------------------------------------------------------


def test_full_demo_is_fair_to_both_classes() -> None:
    plan = demo.make_plan(demo.CLASSES, quick=False)
    assert [part.ddp for part in plan.segments] == ["torch", "torchddp", "torchddp", "torch"]
    for name in demo.CLASSES:
        first, second = (part for part in plan.segments if part.ddp == name)
        assert (first.resume, second.resume) == (False, True)
        assert 0 < first.stop_after < second.stop_after == plan.steps


def _fake_torchrun(losses_of: dict[str, list[float]]) -> Any:
    """Stands in for training: writes the metrics file that `train_gpt.py` would have written."""

    def run(script: Path, arguments: list[str], **_: Any) -> None:
        options = dict(zip(arguments, arguments[1:], strict=False))
        Path(options["--json"]).write_text(json.dumps(_record(losses_of[options["--ddp"]], ddp=options["--ddp"])))

    return run


def _run_demo(monkeypatch: pytest.MonkeyPatch, out: Path, losses_of: dict[str, list[float]]) -> Any:
    monkeypatch.setattr(demo, "ddp_class", lambda name: None)
    monkeypatch.setattr(demo, "torchrun", _fake_torchrun(losses_of))
    return CliRunner().invoke(demo.app, ["--quick", "--json", "--out", str(out)])


def test_demo_with_equal_losses_ends_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _run_demo(monkeypatch, tmp_path / "out", {"torch": [3.0, 2.0], "torchddp": [3.0, 2.0]})
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["losses"]["bitwise_equal"] is True
    assert "All 3 losses are bitwise equal." in result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["loss.png", "result.json"]


def test_demo_with_different_losses_fails_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _run_demo(monkeypatch, tmp_path, {"torch": [3.0, 2.0], "torchddp": [3.0, 2.1]})
    assert result.exit_code == 1
    assert "error: the losses of torch and torchddp are not the same" in result.stderr
    assert json.loads((tmp_path / "result.json").read_text())["losses"]["equal"] is False


def test_demo_passes_on_that_a_run_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("of yesterday")

    def fail(*args: Any, **options: Any) -> None:
        raise ExampleError("the run failed (torchrun ended with 1)")

    monkeypatch.setattr(demo, "ddp_class", lambda name: None)
    monkeypatch.setattr(demo, "torchrun", fail)
    result = CliRunner().invoke(demo.app, ["--quick", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "error: --ddp torch: the run failed" in result.stderr
    assert list(tmp_path.iterdir()) == []  # nothing left over that looks like a result


# --- child processes -------------------------------------------------------------------------------------------------

# Stands in for torchrun: its child has a session of its own, as torchrun's workers have, and both ignore SIGTERM.
_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(60)
"""


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(condition: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def test_stubborn_children_are_ended_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    said = tmp_path / "said"
    with said.open("w") as output, pytest.raises(ZeroDivisionError):
        with processes._child([sys.executable, "-c", _STUBBORN], output) as child:
            assert _wait_for(lambda: said.read_text().endswith("\n"))
            worker = int(said.read_text())
            assert _is_running(child.pid) and _is_running(worker)
            raise ZeroDivisionError
    assert not _is_running(child.pid)
    assert _wait_for(lambda: not _is_running(worker))


def test_children_do_not_outlive_a_parent_that_is_killed_outright(tmp_path: Path) -> None:
    said = tmp_path / "said"
    parent_code = (
        "import sys, time\nfrom examples.gpt.processes import _child\n"
        "with _child([sys.executable, '-c', 'import time; time.sleep(60)'], sys.stdout) as child:\n"
        "    print(child.pid, flush=True)\n    time.sleep(60)\n"
    )
    with said.open("w") as output:
        parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=output, cwd=demo.ROOT)
        assert _wait_for(lambda: said.read_text().endswith("\n"))
        child = int(said.read_text())
        assert _is_running(child)
        parent.kill()
        parent.wait()
    assert _wait_for(lambda: not _is_running(child))


def test_a_run_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(60)")
    with (tmp_path / "said").open("w") as output:
        with pytest.raises(ExampleError, match="the run did not end within 3 seconds"):
            processes.torchrun(script, [], ranks=1, timeout_seconds=3, output=output)


def test_a_run_that_fails_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(5)")
    with (tmp_path / "said").open("w") as output:
        with pytest.raises(ExampleError, match="the run failed"):
            processes.torchrun(script, [], ranks=1, timeout_seconds=60, output=output)
