"""A rank of the case `recovery`: trains, dies if it is the last one, and else goes on with the others.

    python -m benchmarks.survivor PORT RANK WORLD_SIZE TRANSPORT DIE_AT

Prints as JSON, in seconds of the host's monotonic clock: when the last rank died, when this one got the error, when
the survivors knew each other, and when the next step was done; and how many steps were done twice.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import torchddp

AFTER = 10  # steps after the fault
WIDTH, LAYERS = 256, 4  # 1 MB of gradients


def train(rank: int, world_size: int, transport: Any, die_at: int) -> dict[str, Any]:
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = torchddp.DistributedDataParallel(network, transport=transport, timeout=60, bucket_cap_mb=0.3)
    optimizer = torch.optim.AdamW(model.parameters())
    store = dist.distributed_c10d._get_default_store()
    at: dict[str, Any] = {}
    step = done = 0
    while step < die_at + AFTER:
        try:
            optimizer.zero_grad()
            loss = model(torch.randn(64, WIDTH)).square().mean()
            if step == die_at and rank == world_size - 1:
                network[0].weight.register_hook(lambda _: die(store))  # type: ignore[operator]
            loss.backward()
            optimizer.step()
            step += 1
            done += 1
            if at and "committed_s" not in at:
                at["committed_s"] = time.monotonic()
        except torchddp.TransportError:
            at["error_s"] = time.monotonic()
            ranks = torchddp.survivors(model.process_group)
            at["known_s"] = time.monotonic()
            group = dist.new_group(ranks, use_local_synchronization=True)
            model.update_process_group(group)
            told: list[Any] = [None] * group.size()
            dist.all_gather_object(told, step, group=group)
            first, step = told.index(max(told)), max(told)
            state = [optimizer.state_dict()]
            dist.broadcast_object_list(state, group_src=first, group=group)
            model.sync_module_states(src=first)
            optimizer.load_state_dict(state[0])
    return {**at, "died_s": float(store.get("died")), "repeated": done - step}


def die(store: Any) -> None:
    store.set("died", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    port, rank, world_size, transport, die_at = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world_size))
    print(json.dumps(train(int(rank), int(world_size), transport, int(die_at))), flush=True)
    os._exit(0)  # the group with the dead rank has no orderly end


if __name__ == "__main__":
    main()
