"""The programs of docs/traps.md, and the messages beside them."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import run_ranks
from tests.models import batch, loss_of, seeded
from torchddp.diagnose.cpu_threads import RankThreads, advice

pytestmark = pytest.mark.beyond_torch("tells of no traps")
PAGE = Path(__file__).parents[2] / "docs" / "traps.md"
SECTIONS = dict(re.findall(r"^## (.*)\n([\s\S]*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE))
TRAPS = [name for name, text in SECTIONS.items() if "```python" in text and "```text" in text]


def block(section, language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)
    return found


def run_section(rank, section):
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 8)))
    names = {"torch": torch, "torchddp": torchddp, "dist": dist, "loss_of": loss_of, "rank": rank, "module": module}
    names["batches"] = [batch(rank, step, dtype=torch.float32) for step in range(4)]
    names["model"] = torchddp.DistributedDataParallel(module)
    names["optimizer"] = torch.optim.SGD(module.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(block(section, "python"), "train.py", "exec"), names)
    return [(str(w.message), w.filename) for w in caught if w.category is torchddp.UsageWarning]


@pytest.mark.parametrize("section", TRAPS)
def test_the_messages(section):
    told = [one for by_rank in run_ranks(run_section, 2, section) for one in by_rank]
    assert len(told) == 1, told
    text, file = told[0]
    shown = block(section, "text").strip().removeprefix("UsageWarning: ")
    assert file == "train.py" and text.replace("on rank 1:", "on rank 0:").startswith(shown), (text, shown)


def test_batch_norm_hears_nothing():
    assert len(TRAPS) == 5
    assert run_ranks(run_section, 2, "Batch norm in two forwards") == [[], []]


def test_the_message_about_threads():
    ranks = [RankThreads("host", 8, list(range(8)), list(range(8)), 0, False)] * 2
    assert block("Threads and processors", "text").strip() == f"UsageWarning: {advice(ranks)}"


def test_the_filters():
    lines = [line.strip() for line in SECTIONS["Switching them off"].splitlines() if line.startswith("    ")]
    with warnings.catch_warnings():
        exec("\n".join(lines))
        warnings.warn("No backward has followed the forward", torchddp.UsageWarning, stacklevel=1)
    assert issubclass(torchddp.UsageWarning, UserWarning)
