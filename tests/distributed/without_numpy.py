"""A rank, run as a program where neither numpy nor any package of the extras can be imported; trains in many ways."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

MISSING = {"numpy", "rich", "typer", "matplotlib", "lightning", "accelerate", "transformers", "composer", "torchft"}


class Finder(PathFinder):
    """Python's own, for which these packages are not installed."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in MISSING else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder  # before torch looks for numpy
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook  # noqa: E402

import torchddp  # noqa: E402
from torchddp.optim import OSS  # noqa: E402


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(model: nn.Module, rank: int, optimizer: Any = None, steps: int = 3) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 4, generator=generator)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def raises(kind: type[Exception], words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {words!r}")


def with_options(rank: int) -> None:
    for options in (
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.001},
        {"check_parameters_every": 2, "gradient_stats": True, "find_nonfinite": True},
        {"transport": "shm", "wire_dtype": torch.bfloat16},
        {"transport": "c10d"},
    ):
        model = torchddp.DDP(net(), **options)
        train(model, rank, torch.optim.SGD(model.parameters(), 0.1))
        copy = torchddp.DDP(net())
        copy.load_state_dict(model.state_dict())
        torchddp.check_parameters(copy)


def automatic_buckets(rank: int) -> None:
    train(torchddp.DDP(net(), bucket_cap_mb="auto"), rank, steps=10)


def with_join(rank: int) -> None:
    model = torchddp.DDP(net())
    with model.join():
        train(model, rank, steps=2 + rank)


def with_hooks(rank: int) -> None:
    for name in ("fp16", "bf16", "int8", "int4", "topk", "powersgd", "sign"):
        train(torchddp.DDP(net(), comm_hook=name), rank)
    model = torchddp.DDP(net())
    model.register_comm_hook(None, fp16_compress_hook)
    train(model, rank)


def sharded(rank: int) -> None:
    module = net()
    optimizer = OSS(module.parameters(), torch.optim.Adam, lr=0.01)
    model = torchddp.ShardedDataParallel(module, optimizer)
    train(model, rank, optimizer)
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert optimizer.state_dict()["state"]


def averaged(rank: int) -> None:
    module = net()
    optimizer = torchddp.averaging.DiLoCo(module, torch.optim.SGD(module.parameters(), 0.1), sync_every=2)
    train(module, rank, optimizer, steps=4)


def replicated(rank: int) -> None:
    train(torchddp.replicate(net()), rank)


def installed(rank: int) -> None:
    torchddp.install()
    train(nn.parallel.DistributedDataParallel(net()), rank)
    torchddp.uninstall()


def profiled(rank: int) -> None:
    model = torchddp.DDP(net())
    with torchddp.profiler.profile(model) as profile:
        train(model, rank, steps=4)
    profile.gather()


def differing_models(rank: int) -> None:
    with raises(RuntimeError, "DDP expects same model across all ranks"):
        torchddp.DDP(nn.Linear(4, 2 + rank))
    with raises(ValueError, "The ranks chose different transports"):
        torchddp.DDP(net(), transport=("shm", "c10d")[rank])


WAYS: tuple[Callable[[int], None], ...] = (
    with_options,
    automatic_buckets,
    with_join,
    with_hooks,
    sharded,
    averaged,
    replicated,
    installed,
    profiled,
    differing_models,
)


def main(store_path: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with raises(RuntimeError, "Numpy is not available"):
        torch.zeros(1).numpy()
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for way in WAYS:
        try:
            way(rank)
        except Exception as error:
            raise RuntimeError(f"rank {rank}, {way.__name__}") from error
    assert not MISSING & set(sys.modules), MISSING & set(sys.modules)
    dist.barrier()
    print("trained", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
