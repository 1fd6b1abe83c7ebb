"""The examples of docs/migration.md run on one rank and on two, with equal models at the end."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import torchddp
from tests.harness import each, on_ranks
from tests.models import Mlp, batch, grads_of, local_grads, loss_of, same_on_all_ranks, seeded
from tests.pages import code_of, sections


@pytest.mark.parametrize("section", [section for section in sections() if section != "What went"])
@on_ranks(1, 2)
def test_the_examples(rank, section):
    names = {
        "torch": torch,
        "loss_of": loss_of,
        "module": seeded(Mlp),
        "batches": [batch(rank, step) for step in range(3)],
    }
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
