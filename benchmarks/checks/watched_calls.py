"""The cost of watching collectives, per call: `python -m benchmarks.checks.watched_calls`.

Times torch's functions with and without `torchddp.watch_collectives()`, in turn, over torch's fake process group, which
sends nothing: only Python is timed. The clock is CPU time, which other processes disturb less. A cost is a difference
within a round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchddp
from torchddp.harness.stats import Summary, summarize
from torchddp.harness.tables import plain_table

GOAL_NS = 1000.0
CALLS_A_ROUND = 200  # short, so that other processes seldom interrupt
ROUNDS = 1000


@contextmanager
def silent_group() -> Iterator[None]:
    """A default process group of four ranks, of which only rank 0 exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cases() -> dict[str, Callable[[], object]]:
    tensor, gathered = torch.ones(16), torch.ones(64)
    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "all_gather_single": lambda: dist.all_gather_single(gathered, tensor),
        "barrier": lambda: dist.barrier(),
        "isend": lambda: dist.isend(tensor, 1),
    }


def cost_ns(call: Callable[[], object], rounds: int = ROUNDS) -> Summary:
    """The time of a watched call minus that of a bare call in the same round."""
    order = random.Random(0)
    found = []
    for _ in range(rounds):
        timed: dict[bool, float] = {}
        for watches in order.sample([False, True], 2):
            if watches:
                with torchddp.watch_collectives():
                    timed[watches] = _time_ns(call)
            else:
                timed[watches] = _time_ns(call)
        found.append(timed[True] - timed[False])
    return summarize(np.array(found))


def _time_ns(call: Callable[[], object]) -> float:
    for _ in range(20):  # lets Python specialize its bytecode, and opens the group's log
        call()
    begun_ns = time.thread_time_ns()
    for _ in range(CALLS_A_ROUND):
        call()
    return (time.thread_time_ns() - begun_ns) / CALLS_A_ROUND


def main() -> None:
    console = Console()
    table = plain_table(f"watch_collectives(): cost of a call, {ROUNDS} rounds of {CALLS_A_ROUND}", "function")
    table.add_column("ns p50", justify="right")
    table.add_column("p25..p75", justify="right")
    with silent_group():
        for name, call in cases().items():
            cost = cost_ns(call)
            style = "green" if cost.median < GOAL_NS else "red"
            table.add_row(name, f"[{style}]{cost.median:.0f}", f"{cost.q25:.0f}..{cost.q75:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
