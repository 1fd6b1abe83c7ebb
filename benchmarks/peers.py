"""Classes to compare with the others through ``--vs``.

    python -m benchmarks --case per_param --vs benchmarks.peers.WithTimeline

shows the cost of recording every event of every step: compare its step time with that of "torchddp default".
`WithMonitor` shows the cost of computing statistics for a logger after every step.
"""

from __future__ import annotations

from typing import Any

from torchddp import DistributedDataParallel
from torchddp.profiler import monitor

EVENTS = 100_000


class WithTimeline(DistributedDataParallel):
    """torchddp with its timeline always on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reducer.enable_timeline(EVENTS)


class WithMonitor(DistributedDataParallel):
    """torchddp with per-step statistics for a logger, after every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        monitor(self, lambda step, values: None)
