"""One rank of a replica, under torchrun and a torchft Manager; each rank of a replica has its own network.

Prints `RANK step N PARTICIPANTS COMMITTED`, and finally `RANK done N CHECKSUM`. It trains until the step in the file
`stop`, and exits when all ranks of both replicas have reached it: none fails in its last step because another has left.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch

from examples.train_torchft import batch_of, checksum, make_manager, make_network
from torchddp import fault_tolerance

WIDTH = 256
REPLICAS = 2


class Doom:
    """Sends SIGKILL to this process during a backward pass, while the later half of the gradients is in flight."""

    def __init__(self, network: torch.nn.Module, steps_left: int) -> None:
        self.steps_left = steps_left
        parameters = list(network.parameters())
        parameters[len(parameters) // 2].register_hook(self._strike)

    def _strike(self, grad: torch.Tensor) -> None:
        if self.steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def say(line: str) -> None:
    """Print the line in one write, because a replica's ranks share stdout."""
    os.write(1, f"{os.environ['RANK']} {line}\n".encode())


def run(folder: Path, name: str, kind: str, die_after: int) -> None:
    from torchft import Optimizer

    torch.set_num_threads(1)
    torchrun, rank, world_size = os.getppid(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    network = make_network(WIDTH, seed=int.from_bytes(os.urandom(4), "little"))  # the weights must be healed
    inner = torch.optim.AdamW(network.parameters(), 1e-3)
    manager = make_manager(network, inner, name)
    model: torch.nn.Module
    if kind == "pure":
        model = fault_tolerance.PureDistributedDataParallel(manager, network)
    else:
        hook = "powersgd" if kind == "powersgd" else None
        model = fault_tolerance.DistributedDataParallel(manager, network, bucket_cap_mb=0.3, comm_hook=hook)
    doom = Doom(network, die_after if rank == world_size - 1 else -1)
    optimizer = Optimizer(manager, inner)
    stop = folder / "stop"
    while (step := manager.current_step()) < (int(stop.read_text()) if stop.exists() else sys.maxsize):
        if os.getppid() != torchrun:
            os._exit(1)
        optimizer.zero_grad()
        model(batch_of(step, f"{name} {rank}", WIDTH)).square().mean().backward()
        optimizer.step()
        after = manager.current_step()
        doom.steps_left -= int(after > step and manager.num_participants() > 1)
        say(f"step {after} {manager.num_participants()} {int(after > step)}")
    say(f"done {manager.current_step()} {checksum(network)}")
    (folder / f"done {name} {rank}").touch()
    while len(list(folder.glob("done *"))) < REPLICAS * world_size and os.getppid() == torchrun:
        time.sleep(0.05)
    os._exit(0)  # torchft's manager threads would delay a normal exit by seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--kind")
    parser.add_argument("--die-after", type=int, default=-1, help="the last rank dies after so many shared steps")
    run(**vars(parser.parse_args()))
