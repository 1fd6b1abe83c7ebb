"""The parts of the GPT example that don't need a second rank: data, sampling, options, model, checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from examples import train_gpt
from examples.gpt import checkpoint, data
from examples.gpt.config import TrainConfig, lr_factor
from examples.gpt.errors import ExampleError


def test_default_corpus_is_this_pythons_source(tmp_path: Path) -> None:
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


def test_data_errors_name_what_was_given(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"x" * 17)
    for name, words in (
        ("nowhere", "no such data: .*nowhere"),
        ("folder", "the folder .*folder holds no files"),
        ("empty", "no data: .*empty is empty"),
        ("short", r"data too short: .*short has 17 bytes, --block-size 8 needs at least 18"),
    ):
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--ddp horovod", "unknown --ddp 'horovod': choose one of torchddp, sharded, torch, none"),
        ("--ddp none --width 10 --heads 3", "--width must be a multiple of --heads, got width 10 and heads 3"),
        ("--ddp none --checkpoint /no.ckpt --resume", "no checkpoint at /no.ckpt: omit --resume"),
        ("--ddp none --checkpoint /dev/null/x/y.pt", "--checkpoint /dev/null/x/y.pt: cannot create its folder"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(options: str, words: str) -> None:
    result = CliRunner().invoke(train_gpt.app, options.split())
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"error: {words}")


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


def test_only_constant_schedules_over_the_same_data_can_be_extended(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    checkpoint.save_checkpoint(path, _content())
    with pytest.raises(ExampleError, match="belongs to a run with other settings: steps 150 there, 9 here"):
        checkpoint.load_checkpoint(path, _identity(steps=9))
    with pytest.raises(ExampleError, match="belongs to other data"):
        checkpoint.load_checkpoint(path, _identity() | {"data": "b" * 64})
    checkpoint.save_checkpoint(path, _content(schedule="constant", steps=10))
    assert checkpoint.load_checkpoint(path, _identity(schedule="constant", steps=20))["step"] == 7


def test_damaged_and_unrelated_files_are_bad_checkpoints(tmp_path: Path) -> None:
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


def test_a_failing_write_leaves_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
