"""trl's SFTTrainer with LoRA and our engine: the program of docs/engines.md, bitwise equal to torch's class."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed: make test-clients")
pytest.importorskip("peft", reason="peft is not installed: make test-clients")

from tests.clients.page_programs import WITHOUT, Run, assert_same_as_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.beyond_torch("is not tested here")]

HEADING, STEPS = "trl with LoRA", 6
ADOPTED = """
from torchddp.integrations.accelerate import adopt

adopt(trainer.accelerator, {"transport": "c10d"})
trainer.train()
"""
DERIVED = """
from torchddp.integrations.accelerate import TorchDDPTrainerMixin


class Trainer(TorchDDPTrainerMixin, SFTTrainer):
    pass


trainer = Trainer(
"""


def test_the_pages_program(tmp_path: Path) -> None:
    assert_same_as_torch(HEADING, tmp_path, steps=STEPS)


def test_without_install(tmp_path: Path) -> None:
    torchs = Run(HEADING, tmp_path / "torch", WITHOUT)
    adopted = Run(HEADING, tmp_path / "adopted", WITHOUT, ("trainer.train()", ADOPTED))
    adopted.assert_trained("torchddp", torchs.weights, STEPS)
    assert adopted.ranks[0]["transport"] == "c10d"
    derived = Run(HEADING, tmp_path / "derived", WITHOUT, ("trainer = SFTTrainer(", DERIVED))
    derived.assert_trained("torchddp", torchs.weights, STEPS)


@pytest.mark.parametrize(
    "option",
    [
        "gradient_checkpointing=False, packing=True, max_length=16",
        'gradient_checkpointing_kwargs={"use_reentrant": True}',
        'gradient_checkpointing_kwargs={"use_reentrant": False}',
    ],
)
def test_checkpointing_and_packing(option: str, tmp_path: Path) -> None:
    assert_same_as_torch(HEADING, tmp_path, ("use_cpu=True,", f"use_cpu=True, {option},"), steps=STEPS)
