"""ShardedDataParallel on a GPU trains like torch's class with the plain optimizer."""

import pytest
import torch
import torch.distributed as dist

from tests.gpu.device import chosen_device, make_deterministic
from tests.harness import run_ranks
from tests.sharded import batch_of, loss_of, make_pair


def train(rank: int, transport: str, options: dict[str, object]) -> list[str]:
    """Train twelve steps with accumulation and clipping; return the differences."""
    device = chosen_device()
    make_deterministic(device)
    pair = make_pair(torch.optim.AdamW, {"lr": 0.01}, transport=transport, device=device, **options)
    for step in range(12):
        for model, optimizer in pair.sides():
            if step % 3 == 0:
                with model.no_sync():
                    loss_of(model(batch_of(rank, 100 + step).to(device))).backward()
            loss_of(model(batch_of(rank, step).to(device))).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 6:
            pair.oss.consolidate_state_dict(0)
    owned = sum(p.grad is not None for p in pair.model.parameters())
    assert owned <= len(pair.oss.param_to_rank)
    pairs = zip(pair.model.module.named_parameters(), pair.reference.module.parameters(), strict=True)
    return [name for (name, mine), theirs in pairs if not torch.equal(mine, theirs)]


def test_one_rank(either):
    backend = "nccl" if either.type == "cuda" else "gloo"
    assert run_ranks(train, 1, "auto", {}, timeout=90, start_method="spawn", backend=backend) == [[]]


@pytest.mark.parametrize("overlap", [True, False])
def test_two_ranks_over_gloo(either, overlap):
    assert run_ranks(train, 2, "c10d", {"overlap_gather": overlap}, timeout=90, start_method="spawn") == [[], []]


def sync_batch_norm(rank: int) -> bool:
    from torchddp import ShardedDataParallel
    from torchddp.optim import OSS

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    net = net.to(device)
    model = ShardedDataParallel(net, OSS(net.parameters(), torch.optim.SGD, lr=0.1))
    model(torch.randn(4, 8, device=device) + rank).square().mean().backward()
    mean = net[1].running_mean.clone()
    dist.broadcast(mean, 0)
    return torch.equal(mean, net[1].running_mean)


def test_synchronized_batch_norm(either):
    if either.type != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("torch's SyncBatchNorm runs on CUDA tensors only, and two ranks of NCCL take two GPUs")
    assert run_ranks(sync_batch_norm, 2, timeout=90, start_method="spawn", backend="nccl") == [True, True]
