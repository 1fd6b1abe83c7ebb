"""A rank that goes on with the other survivors, in the same process.

python -m benchmarks.recovery.survivor PORT RANK WORLD_SIZE DIE_AT TRANSPORT
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import torchddp
from benchmarks.recovery.training import AFTER, Trial, backward, make_network


def train(trial: Trial, rank: int, world_size: int, die_at: int, transport: Any) -> None:
    network = make_network()
    model = torchddp.DistributedDataParallel(network, transport=transport, timeout=60, bucket_cap_mb=0.3)
    optimizer = torch.optim.AdamW(model.parameters())
    at: dict[str, float] = {}
    step = done = 0
    while step < die_at + AFTER:
        try:
            optimizer.zero_grad()
            if step == die_at and rank == world_size - 1:
                trial.die_in_backward(network)
            backward(model)
            optimizer.step()
            step += 1
            done += 1
            if at and "committed" not in at:
                at["committed"] = time.monotonic()
        except torchddp.TransportError:
            at["noticed"] = time.monotonic()
            ranks = torchddp.survivors(model.process_group)
            at["agreed"] = time.monotonic()
            group = dist.new_group(ranks, use_local_synchronization=True)
            model.update_process_group(group)
            told: list[Any] = [None] * group.size()
            dist.all_gather_object(told, step, group=group)
            first, step = told.index(max(told)), max(told)
            state = [optimizer.state_dict()]
            dist.broadcast_object_list(state, group_src=first, group=group)
            model.sync_module_states(src=first)
            optimizer.load_state_dict(state[0])
    trial.report(done - step, **at)


def main() -> None:
    port, rank, world_size, die_at = map(int, sys.argv[1:5])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world_size)
    train(Trial(port), rank, world_size, die_at, sys.argv[5])
    os._exit(0)  # the group with the dead rank has no orderly end


if __name__ == "__main__":
    main()
