"""The programs of docs/traps.md and their messages."""

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
# The lines of the page's programs that the warnings point at, and the advice they end with.
TRAPS = {
    "no_sync() around backward alone": (4, "put its forward inside too; otherwise, put the backward outside."),
    "no_sync() around forward alone": (4, "if ranks should train on their own, put the backward inside too."),
    "A forward without a backward": (3, "run the forward under torch.no_grad() or in evaluation mode."),
    "Gradients changed on some ranks": (6, "before the average. check_parameters_every=N finds weights that differ."),
    "find_unused_parameters": (5, "Keep it only if later steps leave parameters out."),
}


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
    return [(str(w.message), w.filename, w.lineno, rank) for w in caught if w.category is torchddp.UsageWarning]


@pytest.mark.parametrize(("transport", "world_size"), [("auto", 1), ("shm", 2), ("c10d", 3)])
@pytest.mark.parametrize("section", TRAPS)
def test_the_messages(section, transport, world_size, monkeypatch):
    """One rank gives each warning once, with its line."""
    monkeypatch.setenv("TORCHDDP_TRANSPORT", transport)
    told = run_ranks(run_section, 2 if section.startswith("Gradients") else world_size, section)
    ((text, *place, rank),) = [one for by_rank in told for one in by_rank]
    shown = block(section, "text").strip().removeprefix("UsageWarning: ")
    line, closing = TRAPS[section]
    assert place == ["train.py", line] and text.endswith(closing), text
    assert re.sub(r"on rank \d:", "on rank 0:", text).startswith(shown), (text, shown)
    assert rank == 0 or "no_sync()" in section or "forward" in section


def test_batch_norm_gets_no_warning():
    assert list(TRAPS) == [name for name, text in SECTIONS.items() if "```python" in text and "```text" in text]
    assert run_ranks(run_section, 2, "Batch norm in two forwards") == [[], []]


def test_the_message_about_threads():
    ranks = [RankThreads("host", 8, list(range(8)), list(range(8)), 0, False)] * 2
    assert block("Threads and processors", "text").strip() == f"UsageWarning: {advice(ranks)}"


def test_the_filters():
    lines = [line.strip() for line in SECTIONS["Turning warnings off"].splitlines() if line.startswith("    ")]
    with warnings.catch_warnings():
        exec("\n".join(lines))
        warnings.warn("No backward has followed the forward", torchddp.UsageWarning, stacklevel=1)
    assert issubclass(torchddp.UsageWarning, UserWarning)
