"""docs/torch_features.md names what is there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import torch

import torchddp

PAGE = Path(__file__).parents[2] / "docs" / "torch_features.md"


def test_modes_of_the_compiler_are_those_that_torch_knows():
    named = set(re.findall(r'`"(\w+)"`', PAGE.read_text()))
    modes = {"ddp_optimizer", "no_optimization", "python_reducer", "python_reducer_without_compiled_forward"}
    assert modes <= named
    for mode in modes:
        with torch._dynamo.config.patch(optimize_ddp=mode):
            assert torch._dynamo.utils.get_optimize_ddp_mode() == mode


def test_files_and_links_lead_somewhere():
    text = PAGE.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (PAGE.parent / target).exists(), target
    for name in re.findall(r"(?:tests|examples)/[\w/]+\.py", text):
        assert (PAGE.parents[1] / name).exists(), name
    assert list(PAGE.parents[1].glob("tests/distributed/test_torch_*.py"))


def test_methods_exist():
    for name in re.findall(r"`model\.(\w+)`", PAGE.read_text()):
        assert hasattr(torchddp.DDP, name), name


def test_the_example_compiles():
    code = "\n".join(line for line in PAGE.read_text().splitlines() if line.startswith("    ") or not line)
    compile(textwrap.dedent(code), str(PAGE), "exec")
