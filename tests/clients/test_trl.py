"""trl's SFTTrainer with LoRA and our engine: the program of docs/integrations.md, bitwise equal to torch's class."""

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed: make test-clients")
pytest.importorskip("peft", reason="peft is not installed: make test-clients")

from tests.clients.page_programs import assert_same_as_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.beyond_torch("is not tested here")]

HEADING, STEPS = "trl with LoRA", 6


def test_the_pages_program(tmp_path: Path) -> None:
    assert_same_as_torch(HEADING, tmp_path, steps=STEPS)


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
