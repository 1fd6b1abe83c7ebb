"""Gradients that a program keeps retain their values, as with torch DDP; tests/fuzz covers more cases."""

import pytest
import torch
from torch import nn

from tests.harness import each, on_ranks
from tests.models import batch, loss_of, seeded
from tests.parity.compare import TorchDDP

pytestmark = pytest.mark.beyond_torch("has no transports to choose from")

WIDTH = 600  # a weight of 1.4 MB, alone in its bucket and not copied


def large_and_small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def train(ddp, rank, step):
    ddp.zero_grad()
    loss_of(ddp(batch(rank, step, 2, 4, dtype=torch.float32))).backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_gradients_kept_from_every_step(ddp_class, transport, rank):
    """Keep more gradients than the transport's memory holds, also those passed to hooks."""

    def kept(cls, in_hooks, **options):
        ddp, found = cls(seeded(large_and_small), **options), []
        for p in ddp.parameters() if in_hooks else ():
            p.register_hook(found.append)
            p.register_post_accumulate_grad_hook(lambda p: found.append(p.grad))
        for step in range(12):
            train(ddp, rank, step)
            found.extend(p.grad for p in ddp.parameters())
        return found

    for in_hooks in each([False, True]):
        ours, theirs = kept(ddp_class, in_hooks, transport=transport), kept(TorchDDP, in_hooks)
        for index, (got, want) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(got, want), f"gradient {index}"
