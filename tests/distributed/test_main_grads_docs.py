"""The examples of docs/main_grads.md run, and do what the page says."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from tests.harness import on_ranks
from tests.models import same_on_all_ranks

PAGE = Path(__file__).parents[2] / "docs" / "main_grads.md"

pytestmark = pytest.mark.beyond_torch("examples of what only torchddp does")


def run_code_of(section, monkeypatch):
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    code = textwrap.dedent("\n".join(line for line in text.splitlines() if line.startswith("    ") or not line))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: None)  # the test's ranks have one
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("section", ["In main_grad", "In .grad"])
@on_ranks(2)
def test_example(rank, section, monkeypatch):
    torch.manual_seed(rank)
    names = run_code_of(section, monkeypatch)
    module = names["module"]
    assert names["model"].reducer.finished_steps == 5
    assert same_on_all_ranks([p.detach() for p in module.parameters()])
    for p in module.parameters():
        assert p.dtype == torch.bfloat16
        assert p.grad is None
        if section == "In main_grad":
            assert p.main_grad.dtype == torch.float32
            assert not p.main_grad.any()  # zero_grad()
        else:
            assert p.grad_dtype == torch.float32


def test_torchs_adamw_takes_no_fp32_gradient_of_a_16_bit_parameter():
    text = re.search(r'raise "(expected\s+dtype c10::BFloat16)"', PAGE.read_text())
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()
    with pytest.raises(RuntimeError, match=" ".join(text[1].split())):
        torch.optim.AdamW([parameter]).step()
