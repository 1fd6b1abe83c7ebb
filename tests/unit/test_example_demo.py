"""The demo without training: figures, comparison of losses, exit codes, and child processes, which never outlive it."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples import demo
from examples.gpt import metrics, processes
from examples.gpt.comparison import LOSS_TOLERANCE, compare_losses
from examples.gpt.errors import ExampleError
from tests.unit.helpers import is_running, wait_until


def _record(losses: list[float]) -> dict[str, Any]:
    numbered = list(enumerate(losses, start=1))
    return {
        **{"world_size": 2, "device": "cpu", "parameters": 1_300_000, "data": {}, "versions": {}, "first_step": 1},
        "steps": [{"step": n, "loss": v, "step_ms": 10.0 + n, "probed": n % 5 == 0} for n, v in numbered],
        "validation": [{"step": len(losses), "loss": losses[-1] + 0.25}],
        "communication": [{"step": n, "exposed_ms": float(n)} for n, _ in numbered if n % 5 == 0],
        "memory": {"training_peak_rss_bytes": 1e8, "peak_rss_bytes": 2e8},
    }


def test_step_times_leave_out_warm_up_and_probed_steps() -> None:
    summary = metrics.summarise([_record([1.0] * 9)])
    assert summary["step_ms_p50"] == 17.0  # steps 4, 6, 7, 8, 9
    assert summary["exposed_communication_ms_p50"] == 5.0


def test_losses_within_rounding_are_equal_and_missing_losses_are_not() -> None:
    losses = _record([3.0, 2.0, 1.0])
    assert compare_losses(losses, losses).bitwise_equal
    comparison = compare_losses(losses, _record([3.0, math.nextafter(2.0, 3.0), 1.0]))
    assert comparison.equal and not comparison.bitwise_equal
    assert "within the tolerance" in comparison.words() and "training step 2" in comparison.words()
    for none in ({"steps": [], "validation": []}, _record([math.nan])):
        assert not compare_losses(none, none).equal
    for other in ([3.0, 2.0 + 3 * LOSS_TOLERANCE, 1.0], [3.0, 2.0], [3.0, 2.0, 1.0, 1.0], [3.0, math.nan, 1.0]):
        comparison = compare_losses(losses, _record(other))
        assert not comparison.equal and "MORE THAN the tolerance" in comparison.words(), other


def _run_demo(monkeypatch: pytest.MonkeyPatch, out: Path, losses_of: dict[str, list[float]]) -> Any:
    """Run the demo with fake metrics files of `train_gpt.py`; without losses the run fails."""

    def torchrun(script: Path, arguments: list[str], **_: Any) -> None:
        options = dict(zip(arguments, arguments[1:], strict=False))
        if options["--ddp"] not in losses_of:
            raise ExampleError("the run failed (torchrun exited with 1)")
        Path(options["--json"]).write_text(json.dumps(_record(losses_of[options["--ddp"]])))

    monkeypatch.setattr(demo, "ddp_class", lambda name: None)
    monkeypatch.setattr(demo, "torchrun", torchrun)
    return CliRunner().invoke(demo.app, ["--quick", "--json", "--out", str(out)])


def test_demo_fails_if_losses_differ_or_a_run_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = _run_demo(monkeypatch, tmp_path / "out", {"torch": [3.0, 2.0], "torchddp": [3.0, 2.0]})
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["losses"]["bitwise_equal"] is True
    assert "All 3 losses are bitwise equal." in result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["loss.png", "result.json"]
    result = _run_demo(monkeypatch, tmp_path, {"torch": [3.0, 2.0], "torchddp": [3.0, 2.1]})
    assert result.exit_code == 1
    assert "error: the losses of torch and torchddp differ" in result.stderr
    assert json.loads((tmp_path / "result.json").read_text())["losses"]["equal"] is False
    result = _run_demo(monkeypatch, tmp_path / "out", {})
    assert result.exit_code == 1 and "error: --ddp torch: the run failed" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []  # no leftover that looks like a result


# A fake torchrun: its child has its own session, as torchrun's workers have, and both ignore SIGTERM.
_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(60)
"""


def test_stubborn_children_are_ended_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    said = tmp_path / "said"
    with said.open("w") as output, pytest.raises(ZeroDivisionError):
        with processes._child([sys.executable, "-c", _STUBBORN], output) as child:
            assert wait_until(lambda: said.read_text().endswith("\n"))
            worker = int(said.read_text())
            assert is_running(child.pid) and is_running(worker)
            raise ZeroDivisionError
    assert not is_running(child.pid)
    assert wait_until(lambda: not is_running(worker))


def test_a_run_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(60)")
    with (tmp_path / "said").open("w") as output, pytest.raises(ExampleError, match="did not end within 1 seconds"):
        processes.torchrun(script, [], ranks=1, timeout_seconds=1, output=output)
