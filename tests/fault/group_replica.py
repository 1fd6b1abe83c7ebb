"""One rank of a multi-rank replica group, under torchrun and a torchft Manager; each rank has its own network.

Prints `RANK PID step N PARTICIPANTS COMMITTED`, and finally `RANK PID done N CHECKSUM`. It trains until the step in the
file `stop`, and exits when all ranks of all groups have reached it.
"""

import os
import sys
import time
from pathlib import Path

import torch

from examples.train_torchft import batch_of, checksum, make_manager, make_network
from torchddp import fault_tolerance

WIDTH = 64
GROUPS = 2


def say(line: str) -> None:
    """Print the line in one write, because a group's ranks share stdout."""
    os.write(1, line.encode() + b"\n")


def main(folder: Path, name: str) -> None:
    from torchft import Optimizer

    torch.set_num_threads(1)
    torchrun = os.getppid()
    me = f"{os.environ['RANK']} {os.getpid()}"
    network = make_network(WIDTH, 4, seed=int.from_bytes(os.urandom(4), "little"))  # healing must copy these
    inner = torch.optim.AdamW(network.parameters(), 1e-3)
    manager = make_manager(network, inner, name)
    model = fault_tolerance.DistributedDataParallel(manager, network, bucket_cap_mb=0.03)
    optimizer = Optimizer(manager, inner)
    stop = folder / "stop"
    while (step := manager.current_step()) < (int(stop.read_text()) if stop.exists() else sys.maxsize):
        if os.getppid() != torchrun:
            os._exit(1)
        optimizer.zero_grad()
        model(batch_of(step, f"{name} {os.environ['RANK']}", WIDTH)).square().mean().backward()
        optimizer.step()
        after = manager.current_step()
        say(f"{me} step {after} {manager.num_participants()} {int(after > step)}")
    say(f"{me} done {manager.current_step()} {checksum(network)}")
    (folder / f"done {name} {os.environ['RANK']}").touch()
    while len(list(folder.glob("done *"))) < GROUPS * int(os.environ["WORLD_SIZE"]) and os.getppid() == torchrun:
        time.sleep(0.05)
    os._exit(0)  # threads of torchft's managers would delay a normal exit by seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
