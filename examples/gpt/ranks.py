"""This process's rank and device, and its process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from examples.gpt.errors import ExampleError

GROUP_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Ranks:
    """This process's rank and its collectives, which do nothing without a process group (`--ddp none`)."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    has_group: bool

    def barrier(self) -> None:
        if self.has_group:
            dist.barrier(device_ids=[self.local_rank] if self.device.type == "cuda" else None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        if not self.has_group:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def sums(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks, in double precision."""
        if not self.has_group or not values:
            return values
        summed = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return summed.tolist()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Fail on all ranks if the block fails on one, so that none waits for a rank that has left."""
        message = None
        try:
            yield
        except ExampleError as error:
            message = str(error)
        failures = [(rank, text) for rank, text in enumerate(self.gather(message)) if text is not None]
        if not failures:
            return
        rank, text = failures[0]
        raise ExampleError(text if len(failures) == self.world_size else f"rank {rank}: {text}")

    def require_same(self, value: Any, what: str) -> None:
        """Raise if a rank's `value` differs from rank 0's."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ExampleError(f"rank {rank} has different {what} than rank 0: all ranks need the same")


def environment_rank() -> int:
    """The rank torchrun gave this process; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def open_ranks(ddp: str, device: str, timeout: timedelta = GROUP_TIMEOUT) -> Iterator[Ranks]:
    """Join torchrun's process group, or one of world size 1, and leave it at the end of the block, even after an error.

    `timeout`: how long a collective may wait for a rank.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world_size = int(os.environ["WORLD_SIZE"]) if launched else 1
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if ddp == "none" and world_size > 1:
        raise ExampleError(f"--ddp none trains in one process, but torchrun started {world_size}")
    chosen = _choose_device(device, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    ranks = Ranks(environment_rank(), local_rank, world_size, chosen, has_group=ddp != "none")
    if not ranks.has_group:
        yield ranks
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if launched:
        _help_gloo_find_an_interface(world_size)
        store, rank, world_size = _meet(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return torchrun's store, this rank and the world size.

    torchrun keeps one store for all attempts. Restarted ranks would find the addresses of dead ones there and try to
    connect to them, so each attempt uses its own key prefix. Several nodes may count restarts differently, so they need
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which creates a store for each attempt.
    """
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return store, rank, world_size


def _choose_device(device: str, local_rank: int, local_world_size: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus < local_world_size:
        raise ExampleError(f"--device cuda needs a GPU per rank: {local_world_size} ranks here, {gpus} GPUs")
    if device == "cpu" or gpus < local_world_size:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _help_gloo_find_an_interface(world_size: int) -> None:
    """Make gloo use the loopback interface if the host's name has no address and all ranks are on this host."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) != world_size or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def transport_of(model: nn.Module) -> str:
    """What carries its gradients: a transport of torchddp, a backend of torch.distributed, or "-" in one process."""
    if transport := getattr(getattr(model, "reducer", None), "transport", None):
        return str(transport.name)
    return dist.get_backend() if dist.is_initialized() else "-"


def ddp_class(name: str) -> type[nn.parallel.DistributedDataParallel]:
    """The class that `--ddp` names, imported on demand."""
    if name == "torch":
        return nn.parallel.DistributedDataParallel
    try:
        import torchddp
    except ImportError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ExampleError(f"cannot import torchddp; choose --ddp torch or fix this: {reason}") from error
    return torchddp.ShardedDataParallel if name == "sharded" else torchddp.DistributedDataParallel
