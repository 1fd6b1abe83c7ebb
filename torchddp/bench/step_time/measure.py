"""Worker side of the cases step_time and scaling: whole training steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from torchddp.bench.cases import Job
from torchddp.bench.timing import Report, Runner, build_runners_of, start_together, time_runners
from torchddp.harness.model_spec import run_forward


@dataclass
class TrainingRunner(Runner):
    """A variant with its optimizer.

    The learning rate is zero: SGD reads and writes all it otherwise would, and weights stay what they are. So the
    variants may share them, and the bare model, whose gradients nobody averages, stays the same on all ranks.
    """

    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD((p for p in self.module.parameters() if p.requires_grad), lr=0.0)

    def step(self, batch: Any, world_size: int = 1) -> float:
        """Gradients dropped, forward, backward, SGD step, begun by `world_size` ranks at once; wall time in ms."""
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(run_forward(self.module, batch)).backward()
        self.optimizer.step()
        return (time.perf_counter_ns() - start_ns) / 1e6


def time_training(job: Job, model_name: str, report: Report) -> dict[str, Any]:
    """Training steps of all variants, interleaved, after their gradients proved equal. The same dict on every rank."""
    return time_runners(job, model_name, build_runners_of(TrainingRunner, job, model_name), report)
