"""The parts of the GPT example that need no second rank: data, sampling, options, checkpoints, losses, processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from examples import train_gpt
from examples.gpt import checkpoint, data
from examples.gpt.config import TrainConfig
from examples.gpt.errors import ExampleError
from tests.harness import each


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


def _identity(**changes: Any) -> dict[str, Any]:
    config = TrainConfig(**changes)
    identity = {"model": config.model_identity(), "training": config.training_identity()}
    return {**identity, "data": "a" * 64}


def _content(**changes: Any) -> dict[str, Any]:
    parts = {"model": {"w": torch.ones(3)}, "optimizers": [], "schedulers": [], "rng": [{"cpu": torch.get_rng_state()}]}
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
