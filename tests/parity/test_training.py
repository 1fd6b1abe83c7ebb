"""Whole training runs and common ways to train give the same numbers as torch DDP."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.harness import each, on_ranks
from tests.models import Branches, Mlp, NormNet, assert_grads, batch, grads_of, loss_of, seeded, step_on
from tests.parity.compare import TorchDDP, assert_same_as_torch


@pytest.mark.rest_is_thorough("2", "3")
@on_ranks(1, 2, 3, 4)
def test_fifty_steps_of_adamw(ddp_class, world_size):
    """Bitwise for up to two ranks; on three and four, AdamW's division amplifies last-bit differences."""
    rtol, optimizer = 0.0 if world_size <= 2 else 1e-9, partial(torch.optim.AdamW, lr=1e-2)
    for options in each([{}, {"gradient_as_bucket_view": False}, {"static_graph": True}]):
        settings = {"options": {"bucket_cap_mb": 0.001, **options}, "optimizer": optimizer}
        assert_same_as_torch(ddp_class, Mlp, step_on, steps=50, rtol=rtol, **settings)


@on_ranks(2, 3)
def test_sparse_embedding_bag(ddp_class, world_size):
    def run(model, rank, step):
        loss_of(model(torch.tensor([[rank, 3], [3, 5 + step]]))).backward()

    for mode in each(["sum", "mean"]):

        def make(mode=mode):
            bag = nn.EmbeddingBag(12, 4, sparse=True, mode=mode, dtype=torch.float64)
            return nn.Sequential(bag, nn.Linear(4, 3, dtype=torch.float64))

        assert_same_as_torch(ddp_class, make, run, rtol=0.0 if world_size == 2 else 1e-12)


@on_ranks(2)
def test_skipped_gradients_of_earlier_steps_stay(ddp_class):
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.0001}
    for dtype, transport in each([torch.float64, torch.complex128], ["c10d", "shm"]):
        os.environ["TORCHDDP_TRANSPORT"] = transport  # torch's class has no such option

        def run(model, rank, step, dtype=dtype):
            for i, branch in enumerate(["left", "right", "right", "left", "never"]):
                loss_of(model(batch(rank, 10 * step + i, 3, 4, dtype=dtype), branch)).backward()

        assert_same_as_torch(ddp_class, partial(Branches, dtype), run, dtype=dtype, options=options)


@on_ranks(2)
def test_forwards_and_backwards_that_do_not_alternate(ddp_class):
    # With batch norm in eval its buffers are saved for backward: broadcasting them in place broke it (pytorch 175024).

    models = [(Mlp, (5, 8)), (lambda: NormNet().eval(), (4, 3, 6, 6))]
    for (make, shape), options in each(models, [{}, {"find_unused_parameters": True}]):

        def run(model, rank, step, shape=shape):
            with pytest.raises(RuntimeError, match="multiplied|4D"):
                model(batch(rank, step, 5, 3))
            with model.no_sync():
                loss = loss_of(model(batch(rank, 10 * step, *shape)))
                loss.backward(retain_graph=True)
                loss.backward()
            loss_of([model(batch(rank, 10 * step + i, *shape)) for i in (1, 2, 3)]).backward()

        assert_same_as_torch(ddp_class, make, run, options=options)


class Checkpointed(nn.Module):
    """Layers recomputed in backward, one by one and in segments."""

    def __init__(self, use_reentrant):
        super().__init__()
        first, *others, last = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(5))
        self.first, self.middle, self.last = first, nn.Sequential(*others), last
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = checkpoint_sequential(self.middle, 2, torch.tanh(self.first(x)), use_reentrant=self.use_reentrant)
        return checkpoint(self.last, torch.tanh(x), use_reentrant=self.use_reentrant)


@on_ranks(2)
def test_activation_checkpointing(ddp_class):
    def run(model, rank, step):
        loss_of(model(batch(rank, step, 3, 4))).backward()

    static = {"static_graph": True}
    cases = [(True, {}), (True, static), (False, {}), (False, static), (False, {"find_unused_parameters": True})]
    for use_reentrant, options in each(cases):
        assert_same_as_torch(ddp_class, partial(Checkpointed, use_reentrant), run, options=options)


@on_ranks(2)
def test_join_with_accumulation_and_unused_search(ddp_class, rank):
    def uneven(cls, find_unused):
        ddp = cls(seeded(Mlp), find_unused_parameters=find_unused)
        seen = []
        with ddp.join():
            for step in range(1 + rank):
                with ddp.no_sync():
                    step_on(ddp, rank, 2 * step)
                step_on(ddp, rank, 2 * step + 1)
                seen.append(grads_of(ddp))
        return seen

    for find_unused in each([False, True]):
        for ours, theirs in zip(uneven(ddp_class, find_unused), uneven(TorchDDP, find_unused), strict=True):
            assert_grads(ours, theirs, rtol=0.0)


@pytest.mark.parametrize(("transport", "steps_before"), [("c10d", 0), ("c10d", 3), ("shm", 1), ("shm", 3)])
@on_ranks(2)
def test_training_goes_on_after_the_group_was_destroyed(ddp_class, transport, steps_before, monkeypatch, rank):
    """Buffers, bucket rebuilds, no_sync and unused parameters work over the group that the model still holds."""
    monkeypatch.setenv("TORCHDDP_TRANSPORT", transport)

    def step_on(model, rank, step):
        model.zero_grad()
        with model.no_sync():
            loss_of(model(batch(rank, step, 4, 3, 6, 6))).backward()
        loss_of(model(batch(rank, step + 10, 4, 3, 6, 6))).backward()
        return grads_of(model), {name: value.clone() for name, value in model.named_buffers()}

    models = [c(seeded(NormNet), find_unused_parameters=True) for c in (ddp_class, TorchDDP)]
    for step in range(steps_before):
        for model in models:
            step_on(model, rank, step)
    within = [loss_of(model(batch(rank, 9, 4, 3, 6, 6))) for model in models]
    dist.destroy_process_group()
    for loss in within:
        loss.backward()
    for step in range(steps_before, steps_before + 4):
        (ours, our_buffers), (theirs, their_buffers) = [step_on(model, rank, step) for model in models]
        assert_grads(ours, theirs, 0.0, what=f"rank {rank}, step {step}:")
        assert_grads(our_buffers, their_buffers, 0.0, what=f"rank {rank}, step {step}:")
