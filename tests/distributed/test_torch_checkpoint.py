"""torch.distributed.checkpoint over our class: the plain module's keys, other numbers of ranks, torch's class."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from tests.harness import each, on_ranks, run_ranks
from tests.models import Mlp, NormNet, batch, loss_of, same_on_all_ranks, seeded
from tests.oss import assert_same_state
from tests.parity.compare import TorchDDP

OPTIONS = [{}, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}]


def step(ddp, optimizer, rank, number):
    optimizer.zero_grad()
    loss_of(ddp(batch(rank, number, 4, 3, 6, 6))).backward()
    optimizer.step()


def trained(cls, steps=2, seed=0):
    """A wrapped model and its optimizer after some steps; the same on all ranks, and at any number of them."""
    ddp = cls(seeded(NormNet, seed))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for number in range(steps):
        step(ddp, optimizer, 0, number)
    return ddp, optimizer


@on_ranks(2)
def test_state_is_that_of_torchs_class(rank, ddp_class):
    """Keys too: those of the plain module, without "module."."""
    for options in each(OPTIONS):
        chosen = StateDictOptions(**options)
        states = [get_state_dict(*trained(cls), options=chosen) for cls in (ddp_class, TorchDDP)]
        assert_same_state(*states)
        is_left_out = options.get("cpu_offload") and rank != 0
        assert list(states[0][0]) == ([] if is_left_out else list(NormNet().state_dict()))
        if not is_left_out:
            assert list(states[0][1]["state"]) == list(states[1][1]["state"])
            NormNet().load_state_dict(states[0][0])


@on_ranks(2)
def test_state_is_set_and_trains_on(rank, ddp_class):
    theirs, ours = trained(TorchDDP), trained(ddp_class, steps=0, seed=1)
    # Copied: optimizers adopt the tensors that they load, and each of the two must have its own.
    model_state, optimizer_state = copy.deepcopy(get_state_dict(*theirs))
    set_state_dict(*ours, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for side in (theirs, ours):
        step(*side, rank, 9)
    assert_same_state(get_state_dict(*ours), get_state_dict(*theirs))

    # Rank 0's is broadcast.
    ddp, _ = trained(ddp_class, steps=1, seed=3)
    want = get_model_state_dict(trained(ddp_class)[0])
    want = {name: value.clone() for name, value in want.items()} if rank == 0 else {}
    # torch puts its own names into the dictionary that it is given, so: a copy.
    set_model_state_dict(ddp, dict(want), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    if rank == 0:
        assert_same_state(get_model_state_dict(ddp), want)
    assert same_on_all_ranks(get_model_state_dict(ddp).values())
    loss_of(ddp(batch(rank, 0, 4, 3, 6, 6))).backward()  # the parameters are still those that are reduced
    assert same_on_all_ranks([p.grad for p in ddp.parameters()])


def state_of(ddp, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(ddp, optimizer), strict=True))


def save_on_rank(rank, cls, folder, asynchronously):
    state = state_of(*trained(cls))
    if asynchronously:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)
    torch.save(state, f"{folder}.rank{rank}")


def load_on_rank(rank, cls, folder):
    ddp, optimizer = trained(cls, steps=0, seed=5)
    state = state_of(ddp, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(ddp, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same_state(state_of(ddp, optimizer), torch.load(f"{folder}.rank0", weights_only=True))
    before = torch.nn.utils.parameters_to_vector(ddp.parameters()).detach().clone()
    step(ddp, optimizer, rank, 7)
    assert same_on_all_ranks(ddp.parameters())
    assert not torch.equal(before, torch.nn.utils.parameters_to_vector(ddp.parameters()))


@pytest.mark.parametrize("saved_by", ["ours", "ours, asynchronously", "torch"])
def test_saved_on_two_ranks_and_loaded_on_one_and_three(ddp_class, saved_by, tmp_path):
    folder = str(tmp_path / "checkpoint")
    run_ranks(save_on_rank, 2, TorchDDP if saved_by == "torch" else ddp_class, folder, "asynchronously" in saved_by)
    for cls, world_size in ((ddp_class, 1), (ddp_class, 3), (TorchDDP, 2)):
        run_ranks(load_on_rank, world_size, cls, folder)


@on_ranks(2)
def test_frozen_and_compiled_parts(ddp_class):
    """torch leaves out frozen parameters when asked to, and the names that torch.compile adds."""

    def states(cls):
        model = seeded(Mlp)
        model.first.weight.requires_grad_(False)
        ddp = cls(torch.compile(model, backend="eager"))
        optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        loss_of(ddp(batch(dist.get_rank()))).backward()
        optimizer.step()
        options = StateDictOptions(ignore_frozen_params=True)
        return get_model_state_dict(ddp, options=options), get_optimizer_state_dict(ddp, optimizer, options=options)

    ours, theirs = states(ddp_class), states(TorchDDP)
    assert_same_state(ours, theirs)
    assert sorted(ours[0]) == ["first.bias", "last.weight", "middle.bias", "middle.weight"]
