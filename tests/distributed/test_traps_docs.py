"""The programs of docs/traps.md and the message of one."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import run_ranks
from tests.models import batch, loss_of, seeded
from tests.pages import DOCS, code_of

pytestmark = pytest.mark.beyond_torch("tells of no traps")
CHANGED, BATCH_NORM = "Gradients changed on some ranks", "Batch norm in two forwards"


def block(section, language):
    of_section = (DOCS / "traps.md").read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", of_section, re.DOTALL)
    return found


def run_section(rank, section):
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 8)))
    names = {"torch": torch, "torchddp": torchddp, "dist": dist, "loss_of": loss_of, "rank": rank}
    names["batches"] = [batch(rank, step, dtype=torch.float32) for step in range(4)]
    names["model"] = torchddp.DistributedDataParallel(module)
    names["optimizer"] = torch.optim.SGD(module.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(block(section, "python"), "train.py", "exec"), names)
    return [(str(w.message), w.filename, w.lineno) for w in caught if w.category is torchddp.UsageWarning]


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_the_message(transport, monkeypatch):
    """Rank 0 warns once, with the line of the program."""
    monkeypatch.setenv("TORCHDDP_TRANSPORT", transport)
    ((text, *place),), others = run_ranks(run_section, 2, CHANGED)
    assert place == ["train.py", 6] and others == []
    assert text.startswith(block(CHANGED, "text").strip().removeprefix("UsageWarning: ")), text
    assert text.endswith("before the average. check_parameters_every=N finds weights that differ.")


def test_batch_norm_gets_no_warning():
    assert run_ranks(run_section, 2, BATCH_NORM) == [[], []]


def test_the_filters():
    with warnings.catch_warnings():
        exec(code_of("traps.md", "Turning the warning off"))
        warnings.warn("Ranks treat averaged gradients differently", torchddp.UsageWarning, stacklevel=1)
    assert issubclass(torchddp.UsageWarning, UserWarning)
