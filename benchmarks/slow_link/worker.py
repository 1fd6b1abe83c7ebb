"""The worker of each rank, in its host's namespace: trains with all methods in turn, slice by slice."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.slow_link.curves import Point, arrival, target_of
from benchmarks.slow_link.job import PATIENCE, TARGET_METHOD, SlowLinkJob
from benchmarks.training.attempt import Entrant, entrant
from benchmarks.training.methods import METHODS
from benchmarks.training.replica import Replica
from benchmarks.training.tasks import Task, gpt_for_a_slow_link, shortened
from benchmarks.two_hosts.network import tx_bytes_path
from benchmarks.two_hosts.worker import serve_inherited
from torchddp.harness.launch import Reporter

# Lets the last acknowledgements leave.
SETTLE_S = 0.02


def largest(value: float) -> float:
    """The maximum over all ranks. Collective."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def quiet_count() -> int:
    """Bytes that this host has sent over the link, read while no rank sends. Collective."""
    dist.barrier()
    time.sleep(SETTLE_S)
    count = int(Path(tx_bytes_path()).read_text())
    dist.barrier()
    return count


class Racer:
    """One method in the race to the target loss. Only its own steps count toward its time."""

    def __init__(self, entry: Entrant, job: SlowLinkJob, task: Task) -> None:
        self.entry, self.job, self.task = entry, job, task
        # A slice ends where all ranks of a local method have the same model.
        self.slice_steps = job.outer.sync_every if METHODS[entry.name].is_local else job.slice_steps
        self.points: list[Point] = []
        self.slice_seconds: list[float] = []
        self.sent_bytes = 0
        self.seconds = 0.0
        self._evaluate()

    def _evaluate(self) -> None:
        """Evaluates the held-out loss, off the clock."""
        loss = self.entry.held_out_loss(self.task)
        if loss is not None:
            self.points.append(Point(self.entry.steps, self.seconds, loss))

    def advance(self) -> None:
        """Trains one slice and evaluates the loss."""
        if self.entry.problem is not None:
            return
        rank, world_size, first = dist.get_rank(), dist.get_world_size(), self.entry.steps
        steps = range(first, first + self.slice_steps)
        batches = [self.task.batch(self.job.seed, step, rank, world_size) for step in steps]
        seconds = 0.0

        def train(replica: Replica) -> None:
            nonlocal seconds
            start_s = time.perf_counter()
            for step, batch in zip(steps, batches, strict=True):
                replica.step(batch, self.task.lr_at(step))
            seconds = time.perf_counter() - start_s

        before = quiet_count()
        self.entry.try_to(train)
        self.sent_bytes += quiet_count() - before
        self.slice_seconds.append(largest(seconds))
        self.seconds += self.slice_seconds[-1]
        self.entry.steps += self.slice_steps
        self._evaluate()

    def is_done(self, target: float) -> bool:
        """Whether it has reached the loss, failed, or run out of steps."""
        late = self.entry.steps >= PATIENCE * self.task.steps
        return late or self.entry.problem is not None or arrival(self.points, target) is not None

    def result(self) -> dict[str, Any]:
        """The method's results; bytes are per host and step."""
        if self.entry.problem is not None:
            return {"error": self.entry.problem}
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, self.sent_bytes / max(1, self.entry.steps))
        return {
            "points": [[point.steps, point.seconds, point.loss] for point in self.points],
            "step_seconds": [seconds / self.slice_steps for seconds in self.slice_seconds],
            "sent_bytes_per_step": by_rank[:: self.job.ranks_per_host],
        }


def race(racers: list[Racer], report: Reporter) -> float:
    """Runs all methods in turn until torch DDP has done its steps, then the others until they are done.

    Each runs one slice more than is reported, because smoothing needs a neighbor.

    Returns:
        The target loss.
    """
    leader = next(racer for racer in racers if racer.entry.name == TARGET_METHOD)
    total = leader.task.steps + leader.slice_steps
    while leader.entry.steps < total and leader.entry.problem is None:
        report(leader.entry.steps, total)
        # No method gets more than a slice ahead of the leader, so that drift affects all alike.
        until = leader.entry.steps + leader.slice_steps
        for racer in racers:
            while racer.entry.steps < until and racer.entry.problem is None:
                racer.advance()
    if leader.entry.problem is not None:
        raise RuntimeError(f"{TARGET_METHOD}, which sets the target loss, failed: {leader.entry.problem}")
    target = target_of(leader.points)
    while waiting := [racer for racer in racers if not racer.is_done(target)]:
        report(total, total)
        for racer in waiting:
            racer.advance()
    return target


def measure(job: SlowLinkJob, rank: int, channel: Connection) -> dict[str, Any]:
    """Runs the race; returns each method's results, the same on every rank."""
    task: Task = shortened(gpt_for_a_slow_link(), job.steps)
    with ExitStack() as stack:
        racers = []
        for index, name in enumerate(job.methods):
            Reporter(channel, f"building {name}", enabled=rank == 0)(index, len(job.methods))
            entry = stack.enter_context(entrant(name, task, job.seed, job.outer, job.collective_timeout_s))
            racers.append(Racer(entry, job, task))
        target = race(racers, Reporter(channel, f"{len(racers)} methods", enabled=rank == 0))
        return {
            "title": task.title,
            "parameters": sum(parameter.numel() for parameter in task.make_model(job.seed).parameters()),
            "unit": task.unit,
            "units_per_step": task.batch_size * task.sample_units * job.world_size,
            "steps": job.steps,
            "target": target,
            "methods": {racer.entry.name: racer.result() for racer in racers},
        }


if __name__ == "__main__":
    serve_inherited(int(sys.argv[1]), measure)
