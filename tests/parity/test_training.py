"""Whole training runs and common ways to train give the same numbers as torch DDP."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.harness import each, on_ranks
from tests.models import Mlp, NormNet, assert_grads, batch, grads_of, loss_of, seeded, step_on
from tests.parity.compare import TorchDDP, assert_same_as_torch


@pytest.mark.rest_is_thorough("2", "3")
@on_ranks(1, 2, 3, 4)
def test_fifty_steps_of_adamw(ddp_class, world_size):
    """Bitwise for up to two ranks; on three and four, AdamW's division amplifies last-bit differences."""
    rtol, optimizer = 0.0 if world_size <= 2 else 1e-9, partial(torch.optim.AdamW, lr=1e-2)
    for options in each([{}, {"gradient_as_bucket_view": False}, {"static_graph": True}]):
        settings = {"options": {"bucket_cap_mb": 0.001, **options}, "optimizer": optimizer}
        assert_same_as_torch(ddp_class, Mlp, step_on, steps=50, rtol=rtol, **settings)


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


@on_ranks(3)
def test_sparse_gradients_in_16_bits(ddp_class, rank):
    """A third is not rounded to 16 bits before it multiplies them."""
    factors = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))

    def average(kind):
        model = kind(seeded(lambda: nn.Embedding(20, 16, sparse=True, dtype=torch.bfloat16)))
        (model(torch.tensor([1, 2, 3, rank + 4])).float() * factors).sum().backward()
        return model.module.weight.grad.to_dense()

    assert torch.equal(average(ddp_class), average(TorchDDP))


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


class Expanded(nn.Module):
    """Gradients that arrive expanded (stride 0), permuted, or as views of something larger."""

    def __init__(self):
        super().__init__()
        self.summed = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        self.sliced = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))

    def forward(self, x):
        scale = x.mean()
        return scale * (self.summed.sum() + self.sliced[:, ::2].sum() + (self.turned.t() + self.summed).sum())


@on_ranks(1, 2, 3)
def test_layout(ddp_class):
    choices = ({}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 0.0001})

    def run(model, rank, step):
        loss_of(model(batch(rank, step, 3, 4))).backward()
        assert all(p.stride() == p.grad.stride() for p in model.parameters())

    for options in each(choices):
        assert_same_as_torch(ddp_class, Expanded, run, options=options)


class Conjugated(nn.Module):
    """Tensors that torch conjugates only when they are read, small and too large for a message with others."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128).conj())
        self.register_buffer("small", torch.randn(3, dtype=torch.complex128).conj())
        self.register_buffer("large", torch.randn(3, 200_000, dtype=torch.complex128).conj())

    def forward(self, x):
        return x.to(torch.complex128) @ self.weight @ (self.large[:, :3] * self.small)


@on_ranks(2)
def test_conjugated_tensors(ddp_class):
    def run(model, rank, step):
        loss_of(model(batch(rank, step, 2, 4))).backward()

    for options in each([{}, {"gradient_as_bucket_view": False}]):
        assert_same_as_torch(ddp_class, Conjugated, run, options=options)


@on_ranks(2)
def test_large_gradient_packed_by_several_threads(ddp_class):
    """A gradient large enough to be split between threads, with an uneven tail."""

    def run(model, rank, step):
        torch.set_num_threads(3)
        model(batch(rank, step, 1, dtype=torch.float32)).sin().sum().backward()

    make = partial(nn.Linear, 1, 1_300_003, bias=False)
    for options in each([{}, {"gradient_as_bucket_view": False}]):
        assert_same_as_torch(ddp_class, make, run, dtype=torch.float32, options=options)
