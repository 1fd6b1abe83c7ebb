"""Programs of docs/ do what checks.md, fault_tolerance.md and migration.md say."""

import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from examples.gpt.processes import torchrun
from tests.harness import each, on_ranks, over_both, run_ranks
from tests.models import Mlp, batch, grads_of, local_grads, loss_of, same_on_all_ranks, seeded
from tests.pages import blocks_of, code_of, common_last_step, sections, signalled

pytestmark = pytest.mark.beyond_torch("pages about torchddp")


CHANGED, BATCH_NORM = "Gradients changed on some ranks", "Batch norm in two forwards"


def run_section(rank, section):
    module = seeded(lambda: nn.Sequential(nn.Linear(8, 8)))
    names = {"torch": torch, "torchddp": torchddp, "dist": dist, "loss_of": loss_of, "rank": rank}
    names["batches"] = [batch(rank, step, dtype=torch.float32) for step in range(4)]
    names["model"] = torchddp.DistributedDataParallel(module)
    names["optimizer"] = torch.optim.SGD(module.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(code_of("checks.md", section), "train.py", "exec"), names)
    return [(str(w.message), w.filename, w.lineno) for w in caught if w.category is torchddp.UsageWarning]


@over_both
def test_the_message_of_a_trap(transport, monkeypatch):
    """Rank 0 warns once, with the line of the program."""
    monkeypatch.setenv("TORCHDDP_TRANSPORT", transport)
    ((text, *place),), others = run_ranks(run_section, 2, CHANGED)
    assert place == ["train.py", 6] and others == []
    (shown,) = blocks_of("checks.md", CHANGED, "text")
    assert text.startswith(shown.removeprefix("UsageWarning: ")), text
    assert text.endswith("before the average. checks=Checks(parameters_every=N) finds weights that differ.")


def test_batch_norm_gets_no_warning():
    assert run_ranks(run_section, 2, BATCH_NORM) == [[], []]


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


SETTINGS = [(True, 1.0, False), (True, 4.0, True), (False, 1.0, False), (False, 1.0, True), (False, 2.0, False)]


@on_ranks(2)
def test_the_hook_reduces_like_apex(rank):
    """Divide, sum, then multiply by predivide / world_size (the last only if it averages)."""
    names = {"dist": torch.distributed}
    source = code_of("migration.md", "From apex.parallel")
    exec(source[source.index("def reduce_as_apex") : source.index("settings = ")], names)

    def run(model, rank, dtype):
        loss_of(model(batch(rank, dtype=dtype))).backward()

    for average, predivide, always_fp32 in each(SETTINGS):
        dtype = torch.bfloat16 if always_fp32 else torch.float64
        settings = (torch.distributed.group.WORLD, average, predivide, always_fp32)
        model = seeded(partial(Mlp, dtype=dtype))
        alone = [local_grads(model, partial(run, rank=peer, dtype=dtype)) for peer in range(2)]
        ddp = torchddp.DDP(model, comm_hook=(settings, names["reduce_as_apex"]), bucket_cap_mb=0.001)
        run(ddp, rank, dtype)
        factor = predivide / 2 if average else 1.0
        for name, grad in grads_of(ddp).items():
            a, b = (grads[name].float() if always_fp32 else grads[name] for grads in alone)
            assert torch.equal(grad, ((a / predivide + b / predivide) * factor).to(dtype))
