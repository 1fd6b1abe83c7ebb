"""The worker of each rank: trains with every method in turn, on the same data from the same weights."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from benchmarks.convergence.job import QUICK_STEPS, ConvergenceJob, evaluation_steps
from benchmarks.training.attempt import entrant
from benchmarks.training.replica import Replica
from benchmarks.training.tasks import TASKS, shortened
from torchddp.harness.launch import Reporter


class TaskRuns:
    """All runs of one task."""

    def __init__(self, job: ConvergenceJob, name: str, channel: Connection) -> None:
        self.job = job
        self.task = shortened(TASKS[name](), QUICK_STEPS[name]) if job.quick else TASKS[name]()
        self.channel = channel
        self.done = 0

    def result(self) -> dict[str, Any]:
        """The task and each method's runs, one per seed; the same on every rank except for the bytes sent."""
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in self.job.methods}
        for seed in range(self.job.seeds):
            for method in self.job.methods:
                runs[method].append({"seed": seed, **self.train(method, seed)})
                self.done += 1
        model = self.task.make_model(0)
        return {
            "task": self.task.name,
            "title": self.task.title,
            "unit": self.task.unit,
            "units_per_step": self.task.batch_size * self.task.sample_units * self.job.world_size,
            "steps": self.task.steps,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "runs": runs,
        }

    def train(self, method: str, seed: int) -> dict[str, Any]:
        """One run: its curve of [step, held-out loss, bytes sent by rank 0 so far], or the error that ended it."""
        curve: list[list[float | None]] = []
        label = f"{self.task.name}, seed {seed}, {method}"
        report = Reporter(self.channel, label, enabled=dist.get_rank() == 0)
        with entrant(method, self.task, seed, self.job.outer, self.job.collective_timeout_s) as entry:

            def evaluate() -> None:
                loss = entry.held_out_loss(self.task)
                if loss is not None and entry.replica is not None:
                    curve.append([entry.steps, loss, entry.replica.sent_bytes])

            def train_until(last: int, replica: Replica) -> None:
                for step in range(entry.steps, last):
                    batch = self.task.batch(seed, step, dist.get_rank(), dist.get_world_size())
                    replica.step(batch, self.task.lr_at(step))
                    report(self.done + step / self.task.steps, self.job.seeds * len(self.job.methods))
                entry.steps = last

            evaluate()
            for last in evaluation_steps(self.task.steps, self.job.outer.sync_every):
                entry.try_to(partial(train_until, last))
                if last == self.task.steps:
                    entry.try_to(Replica.end)
                evaluate()
        return {"curve": curve} if entry.problem is None else {"error": entry.problem}


def measure(job: ConvergenceJob, rank: int, channel: Connection) -> list[dict[str, Any]]:
    """Every task in turn."""
    return [TaskRuns(job, name, channel).result() for name in job.tasks]
