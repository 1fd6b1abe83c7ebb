"""What ShardedDataParallel holds: gradients and optimizer state of its share, and little more."""

import pytest
import torch
from torch import nn

import torchddp
from tests.harness import each, on_ranks
from tests.sharded import batch_of, loss_of, make_pair
from tests.whole_buckets import WholeSharded
from torchddp.optim import OSS


def bytes_of(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Even(nn.Module):
    """Layers that can be shared out evenly: `count` of `width` squared elements."""

    def __init__(self, width: int, count: int = 36) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.rest_is_thorough("2-*", "3-alone-c10d")
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("width", [128, 520], ids=["in-buckets", "alone"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@on_ranks()
def test_each_rank_holds_its_share(world_size, width, transport):
    net = Even(width)
    oss = OSS(net.parameters(), torch.optim.AdamW, lr=0.01)
    # A bucket for each layer, so that what passes through is little of the whole.
    model = torchddp.ShardedDataParallel(net, oss, transport=transport, reduce_buffer_size=128 * 128)
    for _ in range(3):
        loss_of(model(torch.randn(4, width))).backward()
        grads = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
        held = model.reducer.bucket_memory_bytes
        oss.step()
        oss.zero_grad()
    state = bytes_of(t for entry in oss.state.values() for t in entry.values() if t.numel() > 1)
    share, whole = 1 / world_size, sum(p.nbytes for p in net.parameters())
    assert grads / whole == pytest.approx(share) and state / (2 * whole) == pytest.approx(share)
    # Small gradients of the others pass through memory of which eight blocks are kept.
    assert share <= held / whole <= share + (9 / 36 if width == 128 else 0)


@on_ranks(2)
def test_gradients_that_were_given_away_are_gone_before_backward_ends(rank):
    """At most a few of another rank's large gradients are alive at once."""
    net = Even(520, count=16)
    oss = OSS(net.parameters(), torch.optim.SGD, lr=0.01)
    model = torchddp.ShardedDataParallel(net, oss, transport="shm")
    alive = []
    foreign = [p for p in net.parameters() if oss.param_to_rank[p] != rank]
    net.layers[0].register_full_backward_hook(lambda *_: alive.append(sum(p.grad is not None for p in foreign)))
    for _ in range(3):
        model(torch.randn(4, 520, requires_grad=True)).square().mean().backward()
        oss.step()
        oss.zero_grad()
    assert alive and max(alive) == 0


@on_ranks(1, 2, 3)
def test_the_way_of_devices_gives_the_same_bits(rank, monkeypatch, world_size):
    monkeypatch.setattr(torchddp, "ShardedDataParallel", WholeSharded)
    for transport in each(["shm", "c10d"] if world_size > 1 else ["c10d"]):
        pair = make_pair(torch.optim.AdamW, transport=transport)
        assert type(pair.sharded) is WholeSharded
        for step in range(6):
            if step % 2:
                for model, _ in pair.sides():
                    with model.no_sync():
                        loss_of(model(batch_of(rank, 50 + step))).backward()
            pair.backward(step)
            pair.assert_sharded()
            pair.step(set_to_none=step % 3 == 0)
        pair.assert_equal(**({"rtol": 1e-4, "atol": 1e-5} if world_size > 2 and transport == "c10d" else {}))
