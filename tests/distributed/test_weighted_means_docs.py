"""The examples of docs/weighted_means.md run, and give what the page says."""

import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import on_ranks
from tests.models import same_on_all_ranks

PAGE = Path(__file__).parents[2] / "docs" / "weighted_means.md"

pytestmark = pytest.mark.beyond_torch("examples of what only torchddp does")


def code_blocks():
    """Those that begin with an import."""
    blocks, lines = [], []
    for line in [*PAGE.read_text().splitlines(), "end"]:
        if line.startswith("    ") or (not line and lines):
            lines.append(line)
        elif lines:
            blocks.append(textwrap.dedent("\n".join(lines)))
            lines = []
    return [block for block in blocks if block.startswith("import torch\n")]


def run(code, monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)  # the test's ranks have one
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@on_ranks(4)
def test_one_backward(rank, monkeypatch):
    torch.manual_seed(rank)
    names = run(code_blocks()[0], monkeypatch)
    everything = [None] * 4
    dist.all_gather_object(everything, (names["inputs"], names["labels"]))
    model = names["model"].module
    mine = model.weight.grad.clone()
    inputs, labels = (torch.cat(parts) for parts in zip(*everything, strict=True))
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    torch.testing.assert_close(mine, model.weight.grad)
    assert len(labels) == 15


@on_ranks(2)
def test_several_microbatches(monkeypatch):
    names = run(code_blocks()[1], monkeypatch)
    assert same_on_all_ranks([p.detach() for p in names["model"].parameters()])
    assert all(p.isfinite().all() for p in names["model"].parameters())
