"""The examples of docs/main_grads.md run, and do what the page says."""

import re

import pytest
import torch

from tests.harness import on_ranks
from tests.models import same_on_all_ranks
from tests.pages import DOCS, run_code

pytestmark = pytest.mark.beyond_torch("examples of what only torchddp does")


@pytest.mark.parametrize("section", ["In main_grad", "In .grad"])
@on_ranks(2)
def test_example(rank, section):
    torch.manual_seed(rank)
    names = run_code("main_grads.md", section)
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
    text = re.search(r'raise\s+"(expected\s+dtype\s+c10::BFloat16)"', (DOCS / "main_grads.md").read_text())
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=0.1, momentum=0.9).step()
    with pytest.raises(RuntimeError, match=" ".join(text[1].split())):
        torch.optim.AdamW([parameter]).step()
