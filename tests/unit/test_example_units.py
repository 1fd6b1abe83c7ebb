"""The parts of the GPT example that need no second rank: data, sampling, options, checkpoints, losses, processes."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from examples import demo, train_gpt
from examples.gpt import checkpoint, data, metrics, processes
from examples.gpt.comparison import LOSS_TOLERANCE, compare_losses
from examples.gpt.config import TrainConfig, lr_factor
from examples.gpt.errors import ExampleError
from tests.harness import each
from tests.unit.helpers import is_running, wait_until


def test_the_corpus_is_the_standard_librarys_source_or_a_given_file(tmp_path: Path) -> None:
    corpus = data.load_corpus(None, 64)
    text = bytes(corpus.train.numpy()) + bytes(corpus.validation.numpy())
    assert Path(json.__file__).read_bytes() in text
    assert Path(torch.__file__).read_bytes() not in text
    assert len(text) == corpus.size_bytes > 1_000_000
    assert data.load_corpus(None, 64).sha256 == corpus.sha256
    text = bytes(range(200)) * 10
    (tmp_path / "text").write_bytes(text)
    corpus = data.load_corpus(tmp_path / "text", 8)
    assert bytes(corpus.train.numpy()) == text[:1800]
    assert bytes(corpus.validation.numpy()) == text[1800:]


def test_hidden_files_and_python_outside_the_standard_library_are_left_out(tmp_path: Path) -> None:
    kept = ["abc.py", "json/__init__.py", "json/tool.py", "zlib_.py"]
    others = ["abc.txt", "dist-packages/a.py", "json/tests/a.py", "site-packages/a.py", "test/a.py"]
    for name in (*reversed(kept), *others, ".hidden.py", ".git/config.py", "json/.cache/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name:40}")
    (tmp_path / "gone.py").symlink_to("nowhere")
    assert data.python_source_files(tmp_path) == [tmp_path / name for name in kept]
    names = sorted([*kept, *others])
    assert data.data_files(tmp_path) == [tmp_path / name for name in names]
    corpus = data.load_corpus(tmp_path, 8)
    assert bytes([*corpus.train, *corpus.validation]).decode().split() == names


def test_data_errors_name_the_path(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 17)
    cases = (
        ("nowhere", "no such data: .*nowhere"),
        ("folder", "the folder .*folder holds no files"),
        ("empty", "no data: .*empty is empty"),
        ("short", r"data too short: .*short has 17 bytes, --block-size 8 needs at least 18"),
    )
    for name, words in each(cases):
        with pytest.raises(ExampleError, match=words):
            data.load_corpus(tmp_path / name, 8)


def test_each_rank_draws_its_own_batches_from_the_whole_text() -> None:
    def offsets(index: int, rank: int, choices: int) -> list[int]:
        drawn = data.batch_offsets(seed=3, index=index, rank=rank, world_size=2, batch_size=100, choices=choices)
        return drawn.tolist()

    batches = [set(offsets(index, rank, 1 << 40)) for index in range(3) for rank in range(2)]
    assert len(set.union(*batches)) == 600
    assert set(offsets(0, 0, 5)) == set(range(5))
    # Targets are the next bytes.
    text = torch.arange(100, dtype=torch.uint8)
    tokens, targets = data.windows_at(text, torch.tensor([0, 40]), 5, torch.device("cpu"))
    assert tokens.tolist() == [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [41, 42, 43, 44, 45]]


def test_an_invalid_option_is_one_line_and_exit_code_2() -> None:
    for options, words in (
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--seed -1", "--seed must not be negative, got -1"),
        ("--lr nan", "--lr must be a positive number, got nan"),
        ("--dropout 1", "--dropout must be in [0, 1), got 1.0"),
        ("--steps 5 --stop-after 6", "--stop-after must be between 1 and --steps (5), got 6"),
        ("--schedule magic", "unknown --schedule 'magic': choose one of "),
        ("--device tpu", "unknown --device 'tpu': choose one of "),
        ("--resume", "--resume needs --checkpoint PATH"),
        ("--save-every 5", "--save-every needs --checkpoint PATH"),
        ("--ddp none --data /no/such/text", "no such data: /no/such/text"),
        ("--ddp none --json /tmp", "--json /tmp is a folder: name a file"),
        ("--ddp horovod", "unknown --ddp 'horovod': choose one of torchddp, sharded, torch, none"),
        ("--ddp none --width 10 --heads 3", "--width must be a multiple of --heads, got width 10 and heads 3"),
        ("--ddp none --checkpoint /no.ckpt --resume", "no checkpoint at /no.ckpt: omit --resume"),
        ("--ddp none --checkpoint /dev/null/x/y.pt", "--checkpoint /dev/null/x/y.pt: cannot create its folder"),
    ):
        result = CliRunner().invoke(train_gpt.app, options.split())
        assert result.exit_code == 2, options
        assert len(result.stderr.splitlines()) == 1, options
        assert result.stderr.startswith(f"error: {words}"), options


def test_learning_rate_warms_up_and_then_falls_to_a_tenth() -> None:
    config = TrainConfig(steps=100, warmup_steps=9)
    factors = [lr_factor(step, config) for step in range(101)]
    assert factors[:9] == pytest.approx([0.1 * (step + 1) for step in range(9)])
    assert factors[9] == 1.0
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert factors[100] == pytest.approx(0.1)
    constant = TrainConfig(steps=100, warmup_steps=0, schedule="constant")
    assert {lr_factor(step, constant) for step in range(200)} == {1.0}


def _identity(**changes: Any) -> dict[str, Any]:
    config = TrainConfig(**changes)
    identity = {"model": config.model_identity(), "training": config.training_identity()}
    return {**identity, "data": "a" * 64, "world_size": 2}


def _content(**changes: Any) -> dict[str, Any]:
    parts = {"model": {"w": torch.ones(3)}, "optimizer": {}, "scheduler": {}, "rng": [{"cpu": torch.get_rng_state()}]}
    return {"identity": _identity(**changes), "step": 7, **parts}


def test_checkpoints_of_other_runs_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save_checkpoint(path, _content())
    with pytest.raises(ExampleError, match="belongs to a run with other settings: steps 150 there, 9 here"):
        checkpoint.load_checkpoint(path, _identity(steps=9))
    with pytest.raises(ExampleError, match="belongs to other data"):
        checkpoint.load_checkpoint(path, _identity() | {"data": "b" * 64})
    checkpoint.save_checkpoint(path, _content(schedule="constant", steps=10))
    assert checkpoint.load_checkpoint(path, _identity(schedule="constant", steps=20))["step"] == 7
    checkpoint.save_checkpoint(tmp_path / "whole.pt", _content())
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "none.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({**_content(), "format": 99}, tmp_path / "newer.pt")
    for name in ("half", "text", "none", "list", "newer"):
        with pytest.raises(ExampleError, match=f"bad checkpoint .*{name}.pt: ") as caught:
            checkpoint.load_checkpoint(tmp_path / f"{name}.pt", _identity())
        assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_checkpoint_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save_checkpoint(path, _content())

    def fills_the_disk(content: object, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", fills_the_disk)
    with pytest.raises(ExampleError, match="cannot write checkpoint .*c.pt: No space left on device"):
        checkpoint.save_checkpoint(path, {**_content(), "step": 8})
    monkeypatch.undo()
    assert checkpoint.load_checkpoint(path, _identity())["step"] == 7
    assert [file.name for file in tmp_path.iterdir()] == ["c.pt"]


def _record(losses: list[float]) -> dict[str, Any]:
    numbered = list(enumerate(losses, start=1))
    return {
        **{"world_size": 2, "device": "cpu", "parameters": 1_300_000, "data": {}, "versions": {}, "first_step": 1},
        "steps": [{"step": n, "loss": v, "step_ms": 10.0 + n, "probed": n % 5 == 0} for n, v in numbered],
        "validation": [{"step": len(losses), "loss": losses[-1] + 0.25}],
        "communication": [{"step": n, "exposed_ms": float(n)} for n, _ in numbered if n % 5 == 0],
        "memory": {"training_peak_rss_bytes": 1e8, "peak_rss_bytes": 2e8},
    }


def test_losses_are_equal_only_within_rounding_and_if_none_is_missing() -> None:
    summary = metrics.summarize([_record([1.0] * 9)])
    assert summary["step_ms_p50"] == 17.0  # steps 4, 6, 7, 8, 9
    assert summary["exposed_communication_ms_p50"] == 5.0
    losses = _record([3.0, 2.0, 1.0])
    assert compare_losses(losses, losses).bitwise_equal
    comparison = compare_losses(losses, _record([3.0, math.nextafter(2.0, 3.0), 1.0]))
    assert comparison.equal and not comparison.bitwise_equal
    assert "within the tolerance" in comparison.words() and "training step 2" in comparison.words()
    for none in ({"steps": [], "validation": []}, _record([math.nan])):
        assert not compare_losses(none, none).equal, none
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


def test_the_demo_fails_if_losses_differ_or_a_run_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(1000)"
worker = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(1000)
"""


def test_children_that_ignore_sigterm_are_killed_when_the_block_ends(tmp_path, monkeypatch):
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
    script.write_text("import time; time.sleep(1000)")
    with (tmp_path / "said").open("w") as output, pytest.raises(ExampleError, match="did not end within 1 seconds"):
        processes.torchrun(script, [], ranks=1, timeout_seconds=1, output=output)
