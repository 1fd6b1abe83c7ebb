"""torch.distributed.checkpoint with our class: the plain module's keys, other world sizes, torch's class."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from tests.harness import each, on_ranks, run_ranks
from tests.models import NormNet, batch, loss_of, same_on_all_ranks, seeded
from tests.oss import assert_same_state
from tests.parity.compare import TorchDDP

OPTIONS = [{}, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}]


def step(ddp, optimizer, rank, number):
    optimizer.zero_grad()
    loss_of(ddp(batch(rank, number, 4, 3, 6, 6))).backward()
    optimizer.step()


def trained(cls, steps=2, seed=0, frozen=False):
    """A wrapped model and its optimizer after some steps, equal on all ranks and for any world size."""
    model = seeded(NormNet, seed)
    model.conv.requires_grad_(not frozen)
    ddp = cls(model)
    optimizer = torch.optim.AdamW([p for p in ddp.parameters() if p.requires_grad], lr=0.01)
    for number in range(steps):
        step(ddp, optimizer, 0, number)
    return ddp, optimizer


@on_ranks(2)
def test_state_equals_torchs(rank, ddp_class):
    """Including keys, which are the plain module's, without "module."."""
    for options in each(OPTIONS):
        chosen = StateDictOptions(**options)
        states = [get_state_dict(*trained(cls), options=chosen) for cls in (ddp_class, TorchDDP)]
        assert_same_state(*states)
        is_left_out = options.get("cpu_offload") and rank != 0
        assert list(states[0][0]) == ([] if is_left_out else list(NormNet().state_dict()))
        if not is_left_out:
            assert list(states[0][1]["state"]) == list(states[1][1]["state"])
            NormNet().load_state_dict(states[0][0])
    chosen = StateDictOptions(ignore_frozen_params=True)
    ours, theirs = (get_state_dict(*trained(cls, frozen=True), options=chosen) for cls in (ddp_class, TorchDDP))
    assert_same_state(ours, theirs)
    assert list(ours[0]) == [name for name in NormNet().state_dict() if not name.startswith("conv.")]


@on_ranks(2)
def test_state_is_set_and_trains_on(rank, ddp_class):
    theirs, ours = trained(TorchDDP), trained(ddp_class, steps=0, seed=1)
    # Copied, because optimizers keep the tensors that they load, and each needs its own.
    model_state, optimizer_state = copy.deepcopy(get_state_dict(*theirs))
    set_state_dict(*ours, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for side in (theirs, ours):
        step(*side, rank, 9)
    assert_same_state(get_state_dict(*ours), get_state_dict(*theirs))
    # Rank 0's is broadcast.
    other, state = trained(ddp_class, steps=1, seed=3), copy.deepcopy(get_model_state_dict(ours[0]))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other[0], dict(state) if rank == 0 else {}, options=options)
    if rank == 0:
        assert_same_state(get_model_state_dict(other[0]), state)
    assert same_on_all_ranks(get_model_state_dict(other[0]).values())
    step(*other, rank, 10)  # its parameters are still reduced
    assert same_on_all_ranks(other[0].parameters())


def state_of(ddp, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(ddp, optimizer), strict=True))


def save_on_rank(rank, cls, folder, asynchronously):
    state = state_of(*trained(cls))
    saved = (dcp.async_save if asynchronously else dcp.save)(state, checkpoint_id=folder)
    if asynchronously:
        saved.result()
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
