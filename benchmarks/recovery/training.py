"""What the ranks train, how one dies, and what the others report."""

from __future__ import annotations

import json
import os
import signal
import time

import torch
import torch.distributed as dist

AFTER = 10  # steps after the fault
WIDTH, LAYERS = 256, 4  # 1 MB of gradients


def make_network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def backward(model: torch.nn.Module) -> None:
    model(torch.randn(64, WIDTH)).square().mean().backward()


class Trial:
    """The store in the process that started the ranks, on the same host: its monotonic clock is everybody's."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def die_in_backward(self, network: torch.nn.Sequential) -> None:
        """Sends SIGKILL to this process in its next backward, while buckets are in flight."""

        def die(_: torch.Tensor) -> None:
            self._store.set("died", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        network[0].weight.register_hook(die)  # type: ignore[operator]

    def report(self, repeated: int, **at: float) -> None:
        """Print what happened when, and how many steps were done twice."""
        died_s = float(self._store.get("died"))
        line = json.dumps({"repeated": repeated, **{part: when_s - died_s for part, when_s in at.items()}})
        os.write(1, f"{line}\n".encode())  # at once, because ranks may share stdout

    def note(self, name: str) -> None:
        self._store.add(name, 1)

    def count(self, name: str) -> int:
        """How many ranks have noted this."""
        return self._store.add(name, 0)
