"""The examples of docs/replicate.md run, and do what the page says."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import torchddp
from tests.harness import on_ranks
from tests.models import same_on_all_ranks

PAGE = Path(__file__).parents[2] / "docs" / "replicate.md"

pytestmark = pytest.mark.beyond_torch("examples of what only torchddp does")


def run_code_of(section, monkeypatch):
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("    ") or not line]
    code = textwrap.dedent("\n".join(lines))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: None)  # the test's ranks have one
    names = {}
    exec(compile(re.sub(r"(?m)^print.*$", "", code), str(PAGE), "exec"), names)
    return names


@on_ranks(2)
def test_one_dimension(monkeypatch):
    before = torchddp.finished_steps()
    model = run_code_of("One dimension", monkeypatch)["model"]
    assert torchddp.finished_steps() - before == 20
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert same_on_all_ranks([p.detach() for p in model.parameters()])


@pytest.mark.slow
@on_ranks(4)
def test_two_dimensions(monkeypatch):
    before = torchddp.finished_steps()
    model = run_code_of("Tensor parallel in the other dimension", monkeypatch)["model"]
    assert torchddp.finished_steps() - before == 20
    assert isinstance(model.state_dict()["0.weight"], DTensor)
    assert same_on_all_ranks([p.detach().full_tensor() for p in model.parameters()])


@on_ranks(2)
def test_mixed_precision(monkeypatch):
    names = run_code_of("Mixed precision", monkeypatch)
    weight = names["model"][0].weight
    assert [names["output"].dtype, weight.dtype, weight.grad.dtype] == [torch.bfloat16, torch.float32, torch.float32]
