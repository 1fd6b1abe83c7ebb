"""Whole training runs and the ways people train: the same numbers as torch DDP."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import on_ranks, run_ranks
from tests.models import Branches, Mlp, NormNet, assert_grads, batch, grads_of, loss_of, seeded
from tests.parity.compare import TorchDDP, assert_same_as_torch


def _step(model, rank, step):
    loss_of(model(batch(rank, step))).backward()


@pytest.mark.rest_is_thorough("{}-*", "*static_graph*-2", "*False*-3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}], ids=str)
def test_fifty_steps_of_adamw(ddp_class, world_size, options):
    """Bit for bit up to two ranks; on three and four AdamW's division carries last-bit differences further."""
    assert_same_as_torch(
        ddp_class,
        Mlp,
        _step,
        world_size,
        steps=50,
        rtol=0.0 if world_size <= 2 else 1e-9,
        options={"bucket_cap_mb": 0.001, **options},
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )


@pytest.mark.parametrize("foreach", [False, True])
def test_conv_net_with_batch_norm_and_momentum(ddp_class, foreach):
    def run(model, rank, step):
        loss_of(model(batch(rank, step, 4, 3, 6, 6, dtype=torch.float32))).backward()

    assert_same_as_torch(
        ddp_class,
        lambda: NormNet(torch.float32),
        run,
        steps=10,
        rtol=0.0,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=foreach),
    )


@pytest.mark.parametrize(("world_size", "mode"), [(2, "sum"), (3, "mean")])
def test_sparse_embedding_bag(ddp_class, world_size, mode):
    def make():
        bag = nn.EmbeddingBag(12, 4, sparse=True, mode=mode, dtype=torch.float64)
        return nn.Sequential(bag, nn.Linear(4, 3, dtype=torch.float64))

    def run(model, rank, step):
        loss_of(model(torch.tensor([[rank, 3], [3, 5 + step]]))).backward()

    assert_same_as_torch(ddp_class, make, run, world_size, rtol=0.0 if world_size == 2 else 1e-12)


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_skipped_gradients_of_earlier_steps_stay(ddp_class, dtype, transport, monkeypatch):
    monkeypatch.setenv("TORCHDDP_TRANSPORT", transport)
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.0001}

    def run(model, rank, step):
        for i, branch in enumerate(["left", "right", "right", "left", "never"]):
            loss_of(model(batch(rank, 10 * step + i, 3, 4, dtype=dtype), branch)).backward()

    assert_same_as_torch(ddp_class, lambda: Branches(dtype), run, 2, dtype=dtype, options=options)


def test_several_forwards_before_one_backward(ddp_class):
    def run(model, rank, step):
        losses = [loss_of(model(batch(rank, 10 * step + i))) for i in range(3)]
        sum(losses).backward()

    assert_same_as_torch(ddp_class, Mlp, run, 2)


def test_one_forward_and_two_backwards_within_no_sync(ddp_class):
    def run(model, rank, step):
        with model.no_sync():
            loss = loss_of(model(batch(rank, 10 * step)))
            loss.backward(retain_graph=True)
            loss.backward()
        loss_of(model(batch(rank, 10 * step + 1))).backward()

    assert_same_as_torch(ddp_class, Mlp, run, 2)


def test_evaluation_between_steps(ddp_class):
    def run(model, rank, step):
        model.eval()
        with torch.no_grad():
            model(batch(rank, step, 4, 3, 6, 6))
        model.train()
        loss_of(model(batch(rank, step, 4, 3, 6, 6))).backward()

    assert_same_as_torch(ddp_class, NormNet, run, 2)


class Checkpointed(nn.Module):
    """Each layer recomputed in backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, torch.tanh(x), use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize(
    ("use_reentrant", "options"),
    [(True, {}), (True, {"static_graph": True}), (False, {}), (False, {"static_graph": True})]
    + [(False, {"find_unused_parameters": True})],
    ids=str,
)
def test_activation_checkpointing(ddp_class, use_reentrant, options):
    def run(model, rank, step):
        loss_of(model(batch(rank, step, 3, 4))).backward()

    assert_same_as_torch(ddp_class, lambda: Checkpointed(use_reentrant), run, 2, options=options)


@pytest.mark.parametrize(("world_size", "divide"), [(2, True), (3, False)])
def test_join_with_uneven_inputs(ddp_class, world_size, divide):
    def uneven(rank, cls):
        ddp = cls(seeded(Mlp), bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        with ddp.join(divide_by_initial_world_size=divide):
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                _step(ddp, rank, step)
                optimizer.step()
        return {name: value.detach() for name, value in ddp.module.named_parameters()}

    def both(rank):
        assert_grads(uneven(rank, ddp_class), uneven(rank, TorchDDP), rtol=0.0 if world_size == 2 else 1e-12)

    run_ranks(both, world_size)


@pytest.mark.parametrize("find_unused", [False, True])
@on_ranks(2)
def test_join_with_accumulation_and_unused_search(ddp_class, find_unused, rank):
    def uneven(rank, cls):
        ddp = cls(seeded(Mlp), find_unused_parameters=find_unused)
        seen = []
        with ddp.join():
            for step in range(1 + rank):
                with ddp.no_sync():
                    _step(ddp, rank, 2 * step)
                _step(ddp, rank, 2 * step + 1)
                seen.append(ddp.module.last.weight.grad.clone())
        return seen

    for ours, theirs in zip(uneven(rank, ddp_class), uneven(rank, TorchDDP), strict=True):
        assert torch.equal(ours, theirs)


def test_autocast_to_bfloat16(ddp_class):
    def run(model, rank, step):
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model(batch(rank, step, 5, 8, dtype=torch.float32)).float()).backward()

    assert_same_as_torch(ddp_class, lambda: Mlp(dtype=torch.float32), run, 2, dtype=torch.float32)


def test_gradients_set_by_the_user_are_added_to(ddp_class):
    """A dense gradient from elsewhere is in .grad when the backward begins."""

    def run(model, rank, step):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + step)
        _step(model, rank, step)

    assert_same_as_torch(ddp_class, Mlp, run, 2)


def test_gradient_clipping_and_scaling_between_steps(ddp_class):
    def run(model, rank, step):
        _step(model, rank, step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    assert_same_as_torch(
        ddp_class, Mlp, run, 2, steps=5, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), rtol=0.0
    )


@pytest.mark.parametrize(("transport", "steps_before"), [("c10d", 0), ("c10d", 3), ("shm", 1), ("shm", 3)])
@on_ranks(2)
def test_training_goes_on_after_the_group_was_destroyed(ddp_class, transport, steps_before, monkeypatch, rank):
    """Buffers, buckets that are rebuilt, no_sync and the search for unused parameters: over the group that is held."""
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


@on_ranks(3)
def test_subgroup(ddp_class, rank):
    """Three ranks, DDP over two of them."""
    group = dist.new_group([0, 2])
    grads = []
    for cls in (ddp_class, TorchDDP) if rank != 1 else ():
        ddp = cls(seeded(Mlp), process_group=group)
        _step(ddp, rank, 0)
        grads.append(grads_of(ddp))
    if rank != 1:
        assert_grads(*grads, rtol=0.0)
    dist.barrier()  # the one outside stays until the others are done: they still connect to each other through it
