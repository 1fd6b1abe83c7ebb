"""The example of docs/freeze_and_thaw.md runs, and does what the page says; what it names is there."""

import re

import pytest
import torch

import torchddp
from tests.harness import on_ranks
from tests.models import same_on_all_ranks
from tests.pages import DOCS, run_code

pytestmark = pytest.mark.beyond_torch("has no refresh_trainable()")


@on_ranks(1, 2)
def test_the_example(rank):
    before = torchddp.finished_steps()
    torch.manual_seed(rank)
    names = run_code("freeze_and_thaw.md")
    assert torchddp.finished_steps() - before == 30
    module, optimizer = names["module"], names["optimizer"]
    assert same_on_all_ranks(list(module.parameters()))
    steps = [int(optimizer.state[module[place].weight]["step"]) for place in (0, 2, 3)]
    assert steps == [20, 30, 10]


def test_files_are_there_and_the_class_says_what_it_sees():
    text = (DOCS / "freeze_and_thaw.md").read_text()
    for name in re.findall(r"examples/\w+\.py", text):
        assert (DOCS.parent / name).exists(), name
    assert f"within {torchddp.ddp.model.LOOK_EVERY} steps" in text


@on_ranks(2, timeout=100.0)
def test_what_is_compiled_inside_goes_on(rank):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    plain.load_state_dict(module.state_dict())
    model, reference = torchddp.DDP(torch.compile(module, backend="eager")), torchddp.DDP(plain)
    for on in (True, False, True):
        for inner, side in ((module, model), (plain, reference)):
            inner[0].requires_grad_(on)
            side.refresh_trainable()
            side(torch.full((2, 4), rank + 1.0)).sum().backward()
        for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
            mine.grad = theirs.grad = None
