"""One replica with torchft's LocalSGD or DiLoCo, or with our averager, around a torchddp model; prints its checksum."""

import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import torchddp
from examples.train_torchft import batch_of, checksum, make_manager, make_network
from torchddp import fault_tolerance


def main(method: str) -> None:
    from torchft.local_sgd import DiLoCo, LocalSGD

    torch.set_num_threads(1)
    name = f"replica_{os.environ['REPLICA_GROUP_ID']}"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    network = make_network(32, 2)
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    manager = make_manager(network, optimizer, name, timeout_s=20, min_replicas=2, use_async_quorum=False)
    model = torchddp.DistributedDataParallel(network)
    context: Any = contextlib.nullcontext()
    averager = None
    if method == "averager":
        averager = fault_tolerance.PeriodicAverager(manager, model, 4, warmup_steps=3)
    elif method == "local_sgd":
        context = LocalSGD(manager, model, optimizer, sync_every=4)
    else:
        outer = torch.optim.SGD(network.parameters(), 0.7, momentum=0.9, nesterov=True)
        context = DiLoCo(manager, [network], optimizer, outer, sync_every=4)
    with context:
        for step in range(16):
            optimizer.zero_grad()
            model(batch_of(step, name, 32)).square().mean().backward()
            optimizer.step()
            if averager is not None:
                averager.average_parameters()
    print(f"syncs {manager.current_step()} {checksum(network)}", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
