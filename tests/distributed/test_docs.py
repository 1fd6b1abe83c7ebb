"""Programs of docs/ do what checks.md, fault_tolerance.md and migration.md say."""

import re
import warnings

import pytest
import torch
from torch import nn

import torchddp
from examples.gpt.processes import torchrun
from tests.harness import on_ranks, run_ranks
from tests.models import Mlp, batch, loss_of, same_on_all_ranks, seeded
from tests.pages import code_of, common_last_step, sections, signalled

pytestmark = pytest.mark.beyond_torch("pages about torchddp")


@on_ranks(2)
def test_batch_norm_in_two_forwards(rank):
    names = {"torch": torch, "torchddp": torchddp, "loss_of": loss_of}
    names["batches"] = [batch(rank, step, dtype=torch.float32) for step in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", torchddp.UsageWarning)
        exec(code_of("checks.md", "Batch norm in two forwards"), names)


@pytest.mark.slow
def test_restart_with_torchrun(tmp_path, monkeypatch):
    """Rank 1 dies in step 25 of the first attempt; the final weights equal those of one process."""
    monkeypatch.chdir(tmp_path)
    code = code_of("fault_tolerance.md", "Restart with torchrun")
    fault = "    if step == 25 and rank == 1 and attempt == '0': os.kill(os.getpid(), 9)\n"
    code, count = re.subn(r"(?m)^    optimizer\.zero_grad\(\)$", fault.rstrip() + r"\n\g<0>", code)
    assert count == 1
    script = tmp_path / "train.py"
    script.write_text(code)
    with (tmp_path / "log").open("w") as log:
        torchrun(script, [], ranks=2, timeout_seconds=120, output=log, errors=log, max_restarts=1)
    saved = torch.load("checkpoint.pt", weights_only=True)
    assert saved["step"] == 40
    log = (tmp_path / "log").read_text()
    assert "SIGTERM" in log or "exitcode: -9" in log
    (wanted,) = run_ranks(lambda rank: {n: v.tolist() for n, v in alone().state_dict().items()}, 1)
    for name, value in saved["model"].items():
        torch.testing.assert_close(value, torch.tensor(wanted[name]))


def test_stop_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(signalled(code_of("fault_tolerance.md", "Stop together on SIGTERM")))
    with (tmp_path / "log").open("w") as log:
        torchrun(script, [], ranks=2, timeout_seconds=120, output=log, errors=log)
    step = common_last_step((tmp_path / "log").read_text())
    assert torch.load("checkpoint.pt", weights_only=True)["step"] == step >= 20


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


@pytest.mark.parametrize(
    "section", [name for name in sections() if name not in ("Former names of arguments", "Removed before 0.2.0")]
)
@on_ranks(1, 2)
def test_migrations(rank, section):
    batches = [batch(rank, step) for step in range(3)]
    names = {"torch": torch, "loss_of": loss_of, "module": seeded(Mlp), "batches": batches}
    if section == "From apex.parallel":
        names["module"] = nn.Linear(8, 2, dtype=torch.float64)
    before = torchddp.finished_steps()
    exec(code_of("migration.md", section), names)
    if section != "From FairScale":
        assert torchddp.finished_steps() > before
    for _ in range(2):
        names["model"].zero_grad()
        loss_of(names["model"](names["batches"][0])).backward()
        if section == "From FairScale":
            names["optimizer"].step()
    assert same_on_all_ranks([p.detach() for p in names["model"].parameters()])
