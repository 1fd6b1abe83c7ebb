"""One replica of a job that continues when other replicas die: a small network under a torchft Manager.

    torchft_lighthouse --bind "[::]:29510" --min_replicas 1 --join_timeout_ms 2000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA_GROUP_ID=0 python -m examples.train_torchft --steps 200 &
    REPLICA_GROUP_ID=1 python -m examples.train_torchft --steps 200 &

Kill one with `kill -9` and start it again: the other continues, and the new one copies its weights and joins.
Under torchrun (`torchrun --nnodes=1 ...`) a replica uses torchrun's store; otherwise it creates its own.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchddp import fault_tolerance


def make_network(width: int = 256, depth: int = 6, seed: int = 0) -> nn.Module:
    """Linear layers of ``width`` x ``width`` fp32 with ReLUs in between."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def make_manager(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    replica: str,
    timeout_s: float = 10.0,
    min_replicas: int = 1,
    **options: Any,
) -> Any:
    """A torchft Manager for a one-rank replica; a healing replica receives weights and optimizer state."""
    from torchft import Manager, ProcessGroupGloo

    fault_tolerance.check_lighthouse()
    timeout = timedelta(seconds=timeout_s)

    def load(state: dict[str, Any]) -> None:
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        global _store  # lives as long as the process
        _store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address, port = "127.0.0.1", str(_store.port)
    return Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"network": network.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=min_replicas,
        timeout=timeout,
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        store_addr=address,
        store_port=int(port),
        replica_id=replica,
        **options,
    )


def batch_of(step: int, replica: str, width: int = 256) -> torch.Tensor:
    """This replica's inputs [16, width] for a step."""
    seed = int.from_bytes(hashlib.sha256(f"{replica} {step}".encode()).digest()[:4], "little")
    return torch.randn(16, width, generator=torch.Generator().manual_seed(seed))


def checksum(network: nn.Module) -> str:
    """A checksum of all weights and buffers, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Train, and print steps, participants and the checksum of the weights."""
    parser = argparse.ArgumentParser(description="Train one replica under a torchft Manager.")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    from torchft import Optimizer

    torch.set_num_threads(1)
    replica = f"replica_{os.environ.get('REPLICA_GROUP_ID', '0')}"
    network = make_network()
    inner = torch.optim.AdamW(network.parameters(), 1e-3)
    manager = make_manager(network, inner, replica)
    model = fault_tolerance.DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < arguments.steps:
        step = manager.current_step()
        optimizer.zero_grad()  # starts the quorum
        model(batch_of(step, replica)).square().mean().backward()
        optimizer.step()  # skipped if the step failed
        if step % 20 == 0:
            print(f"{replica}: step {step}, {manager.num_participants()} replicas", flush=True)
    print(f"{replica}: step {manager.current_step()}, weights {checksum(network)}", flush=True)
    manager.shutdown(wait=False)


_store: dist.TCPStore | None = None

if __name__ == "__main__":
    main()
