"""A replica under torchft, which goes on when another one dies.

TORCHFT_LIGHTHOUSE=... python -m benchmarks.recovery.replica PORT RANK REPLICAS DIE_AT
"""

from __future__ import annotations

import os
import sys
import time

import torch

from benchmarks.recovery.training import Trial, backward, make_network
from examples.train_torchft import make_manager
from torchddp import fault_tolerance


def train(trial: Trial, rank: int, replicas: int, die_at: int) -> None:
    from torchft import Optimizer

    network = make_network()
    inner = torch.optim.AdamW(network.parameters())
    manager = make_manager(network, inner, f"replica_{rank}")
    model = fault_tolerance.DistributedDataParallel(manager, network, bucket_cap_mb=0.3)
    optimizer = Optimizer(manager, inner)
    trial.note("made")
    while trial.count("made") < replicas:
        time.sleep(0.01)
    together = 0  # committed steps in which all took part
    has_reported = False
    while not (has_reported and trial.count("recovered") == replicas - 1):  # the others may need this one's vote
        step = manager.current_step()
        optimizer.zero_grad()  # starts the quorum
        if together == die_at and rank == replicas - 1:
            trial.die_in_backward(network)
        backward(model)
        optimizer.step()  # skipped if the step failed
        if manager.current_step() == step:
            continue
        if manager.num_participants() == replicas:
            together += 1
        elif together and not has_reported:
            trial.report(0, committed=time.monotonic())
            has_reported = True
            trial.note("recovered")


def main() -> None:
    torch.set_num_threads(1)
    port, *others = map(int, sys.argv[1:])
    train(Trial(port), *others)
    os._exit(0)  # torchft's threads would delay a normal exit by seconds


if __name__ == "__main__":
    main()
