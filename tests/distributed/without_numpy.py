"""A rank that trains in many ways, in a program that can't import numpy or any package of the extras."""

import os
import sys
import warnings
from datetime import timedelta
from importlib.machinery import PathFinder

MISSING = {"numpy", "rich", "typer", "matplotlib", "lightning", "accelerate", "transformers", "composer", "torchft"}


class Finder(PathFinder):
    """Python's finder, without these packages."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder  # before torch imports numpy
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook  # noqa: E402

import torchddp  # noqa: E402
from torchddp import Checks, Precision  # noqa: E402
from torchddp.optim import OSS  # noqa: E402


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(model, rank, optimizer=None, steps=3):
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 4, generator=generator)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def with_options(rank):
    for options in (
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.001},
        {"bucket_cap_mb": "auto"},
        {"checks": Checks(parameters_every=2, gradient_stats=True, nonfinite=True)},
        {"transport": "shm", "precision": Precision(wire=torch.bfloat16)},
        {"transport": "c10d"},
    ):
        model = torchddp.DDP(net(), **options)
        train(model, rank, torch.optim.SGD(model.parameters(), 0.1), steps=10)
        copy = torchddp.DDP(net())
        copy.load_state_dict(model.state_dict())
        torchddp.check_parameters(copy)


def with_hooks(rank):
    for hook in ("fp16", "bf16", "int8", "int4", "powersgd", (None, fp16_compress_hook)):
        train(torchddp.DDP(net(), comm_hook=hook), rank)


def with_tools(rank):
    model = torchddp.DDP(net())
    with model.join():
        train(model, rank, steps=2 + rank)
    with torchddp.profiler.profile(model) as profile:
        train(model, rank, steps=4)
    profile.gather()
    torchddp.install()
    train(nn.parallel.DistributedDataParallel(net()), rank)
    torchddp.uninstall()


def otherwise(rank):
    """Sharded, averaged, replicated."""
    module = net()
    optimizer = OSS(module.parameters(), torch.optim.Adam, lr=0.01)
    train(torchddp.ShardedDataParallel(module, optimizer), rank, optimizer)
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert optimizer.state_dict()["state"]
    module = net()
    train(module, rank, torchddp.averaging.DiLoCo(module, torch.optim.SGD(module.parameters(), 0.1), sync_every=2), 4)
    train(torchddp.replicate(net()), rank)


def differing_models(rank):
    with pytest.raises(RuntimeError, match="not the same on all ranks"):
        torchddp.DDP(nn.Linear(4, 2 + rank))
    with pytest.raises(ValueError, match="needs the same options on all ranks: transport"):
        torchddp.DDP(net(), transport=("shm", "c10d")[rank])


def main(store_path, rank):
    torch.set_num_threads(1)
    with pytest.raises(RuntimeError, match="Numpy is not available"):
        torch.zeros(1).numpy()
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for way in (with_options, with_hooks, with_tools, otherwise, differing_models):
        way(rank)
    assert not MISSING & set(sys.modules), MISSING & set(sys.modules)
    dist.barrier()
    print("trained", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
