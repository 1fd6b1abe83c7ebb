"""ShardedDataParallel.unwrap(): the module as it was, with the trained parameters."""

import gc
import weakref

import pytest
import torch

from tests.harness import on_ranks
from tests.sharded import batch_of, loss_of, make_pair, small_net


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_unwrapped_module_has_its_own_memory_and_no_hooks(rank, transport):
    pair = make_pair(torch.optim.AdamW, {"lr": 0.01}, transport=transport)
    pair.train(range(3))
    module, wrapper = pair.sharded.module, weakref.ref(pair.sharded)
    assert pair.sharded.unwrap() is module
    pair.oss.consolidate_state_dict()
    pair.sharded = None
    gc.collect()
    assert wrapper() is None, "something still holds the wrapper"
    for ours, theirs in zip(module.parameters(), pair.reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None and ours.untyped_storage().nbytes() == ours.nbytes
    assert not any(part._forward_pre_hooks for part in module.modules())
    if rank == 0:  # alone: a hook that was left would wait for the other rank
        loss_of(module(batch_of(rank, 9))).backward()
        assert all(param.grad is not None for param in module.parameters())
        assert len(pair.oss.state_dict()["state"]) == len(list(small_net().parameters()))
