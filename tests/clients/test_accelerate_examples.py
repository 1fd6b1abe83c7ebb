"""The examples for Accelerate and the Trainer: they learn, to the same weights as with torch's class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")

from tests.clients.common import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torch("is not tested here")]


def _ends(*arguments: str) -> list[dict[str, Any]]:
    """What the ranks print last."""
    done = launch(*arguments, ranks=2)
    found = [
        json.loads(text) for text in re.findall(r"\{[^{}]*reduced_steps[^{}]*\}", done.stdout)
    ]  # maybe on one line
    assert len(found) == 2 and found[0] == found[1], done.stdout[-2000:]
    return found


def test_train_accelerate() -> None:
    ours = _ends("examples/train_accelerate.py")[0]
    torchs = _ends("examples/train_accelerate.py", "--torch-ddp")[0]
    assert (ours.pop("reduced_steps"), torchs.pop("reduced_steps")) == (3 * 32, 0)
    assert ours == torchs
    assert ours["accuracy"] > 0.8


def test_train_transformers(tmp_path: Path) -> None:
    short = ("examples/train_transformers.py", "--steps", "10")
    ours = _ends(*short, "--output", str(tmp_path))[0]
    torchs = _ends(*short, "--torch-ddp")[0]
    assert (ours.pop("reduced_steps"), torchs.pop("reduced_steps")) == (10, 0)
    assert ours == torchs
    assert ours["eval_loss"] < 5.3  # of 256 bytes, untrained: 5.55
    assert (tmp_path / "checkpoint-10" / "model.safetensors").is_file()
