"""One replica of a run: a child process that reports its steps on stdout and learns from stdin where to stop.

Lines out: `step N PARTICIPANTS COMMITTED`, finally `done N CHECKSUM`. Lines in: `stop N`. It runs until stdin ends,
so that the other's last step does not fail because this one has left.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

import torch

from examples.train_torchft import batch_of, checksum, make_manager, make_network
from tests.fault.torchft_run import KINDS
from torchddp import fault_tolerance

_WIDTH = 256


class _Orders:
    """The instructions read from stdin so far."""

    def __init__(self) -> None:
        self.stop_at = sys.maxsize
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self.stop_at = int(line.split()[1])
        self.ended.set()


class _Doom:
    """Sends SIGKILL to this process during a backward pass, while the later half of the gradients is in flight."""

    def __init__(self, network: torch.nn.Module, steps_left: int) -> None:
        self.steps_left = steps_left
        parameters = list(network.parameters())
        parameters[len(parameters) // 2].register_hook(self._strike)

    def _strike(self, grad: torch.Tensor) -> None:
        if self.steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run(name: str, kind: str, die_after: int) -> None:
    """Train until told to stop."""
    from torchft import Optimizer

    torch.set_num_threads(1)
    orders = _Orders()
    network = make_network(_WIDTH, seed=int.from_bytes(os.urandom(4), "little"))  # the weights must be healed
    inner = torch.optim.AdamW(network.parameters(), 1e-3)
    manager = make_manager(network, inner, name)
    model: torch.nn.Module
    if kind == "pure":
        model = fault_tolerance.PureDistributedDataParallel(manager, network)
    else:
        hook = "powersgd" if kind == "powersgd" else None
        model = fault_tolerance.DistributedDataParallel(manager, network, bucket_cap_mb=0.3, comm_hook=hook)
    doom = _Doom(network, die_after)
    optimizer = Optimizer(manager, inner)
    while (step := manager.current_step()) < orders.stop_at and not orders.ended.is_set():
        optimizer.zero_grad()
        model(batch_of(step, name, _WIDTH)).square().mean().backward()
        optimizer.step()
        after = manager.current_step()
        doom.steps_left -= int(after > step and manager.num_participants() > 1)
        print(f"step {after} {manager.num_participants()} {int(after > step)}", flush=True)
    print(f"done {manager.current_step()} {checksum(network)}", flush=True)
    orders.ended.wait()
    sys.stdout.flush()
    os._exit(0)  # torchft's manager threads would delay a normal exit by seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--die-after", type=int, default=-1, help="die after so many steps committed by two replicas")
    arguments = parser.parse_args()
    run(arguments.name, arguments.kind, arguments.die_after)
