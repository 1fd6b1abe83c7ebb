"""The examples of docs/fault_tolerance.md run and behave as the page says."""

import re

import pytest
import torch

from examples.gpt.processes import torchrun
from tests.harness import gathered, on_ranks, run_ranks
from tests.models import same_on_all_ranks
from tests.pages import code_of, run_code

pytestmark = pytest.mark.beyond_torch("examples of what only torchddp does")


@on_ranks(3)
def test_another_process_group(rank):
    names = run_code("fault_tolerance.md", "Another process group")
    model, optimizer = names["model"], names["optimizer"]
    assert model.process_group.size() == 3
    assert same_on_all_ranks([p.detach() for p in model.parameters()])
    assert gathered([state["step"].item() for state in optimizer.state.values()]) == [[40.0, 40.0]] * 3


@pytest.mark.rest_is_thorough("True")
@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_restart_with_torchrun(dies, tmp_path, monkeypatch):
    """Rank 1 dies in step 25 of the first attempt; the final weights equal those of one process."""
    monkeypatch.chdir(tmp_path)
    code = code_of("fault_tolerance.md", "Restart with torchrun")
    fault = "    if step == 25 and rank == 1 and attempt == '0': os.kill(os.getpid(), 9)\n"
    if dies:
        code, count = re.subn(r"(?m)^    optimizer\.zero_grad\(\)$", fault.rstrip() + r"\n\g<0>", code)
        assert count == 1
    script = tmp_path / "train.py"
    script.write_text(code)
    with (tmp_path / "log").open("w") as log:
        torchrun(script, [], ranks=2, timeout_seconds=120, output=log, errors=log, max_restarts=int(dies))
    saved = torch.load("checkpoint.pt", weights_only=True)
    assert saved["step"] == 40
    assert ("SIGTERM" in (tmp_path / "log").read_text() or "exitcode: -9" in (tmp_path / "log").read_text()) == dies
    (wanted,) = run_ranks(lambda rank: {n: v.tolist() for n, v in alone().state_dict().items()}, 1)
    for name, value in saved["model"].items():
        torch.testing.assert_close(value, torch.tensor(wanted[name]))


def alone():
    """The weights that one process trains with both ranks' data."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(40):
        optimizer.zero_grad()
        for rank in range(2):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
            ((model(x) - x.sum(1, keepdim=True)).square().mean() / 2).backward()
        optimizer.step()
    return model
