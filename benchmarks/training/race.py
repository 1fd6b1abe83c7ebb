"""Methods that train in turns, in one launch. One that fails is dropped, with the reason, on all ranks at once.

All functions are collective.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from benchmarks.hosts import quiet_count
from benchmarks.training.curves import Point, arrival, target_of
from benchmarks.training.methods import METHODS, Setup
from benchmarks.training.replica import Replica
from benchmarks.training.tasks import Task
from torchddp.harness.launch import Report

# All methods are compared with this one: its loss is the target.
REFERENCE = "torch-ddp"
# A method's group has this share of the timeout of the group of all ranks: a rank left alone in it must time out before
# the others time out waiting for that rank.
GROUP_SHARE = 0.4


def problem_of(attempt: Callable[[], object]) -> str | None:
    """Run it on every rank; returns None if all succeeded, else the first failing rank's error."""
    problem = None
    try:
        attempt()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        problem = f"{type(error).__name__}: {lines[0]}"
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    found = [(rank, text) for rank, text in enumerate(said) if text is not None]
    if not found:
        return None
    rank, text = found[0]
    return text if len(found) == len(said) else f"rank {rank}: {text}"


def largest(value: float) -> float:
    """The maximum over all ranks."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


class Racer:
    """A method with its own process group and model. Only its own steps count toward its time.

    Once `problem` is set, it is out of the race. `over_link`: bytes are those that the kernel counts on the link;
    otherwise those that the method counts.
    """

    def __init__(self, name: str, task: Task, seed: int, timeout_s: float, *, over_link: bool) -> None:
        self.name, self.task, self.seed, self.over_link = name, task, seed, over_link
        group = dist.new_group(timeout=datetime.timedelta(seconds=GROUP_SHARE * timeout_s))
        assert group is not None
        self.group = group
        self.replica: Replica | None = None
        self.steps, self.seconds = 0, 0.0
        self.sent_bytes: int | None = 0
        self.step_seconds: list[float] = []
        self.points: list[Point] = []
        self.problem = problem_of(self._build)
        self._evaluate()

    def _build(self) -> None:
        self.replica = METHODS[self.name].build(Setup(self.task, self.seed, self.group))

    def close(self) -> None:
        if self.replica is not None:
            self.replica.close()
        self.replica = None
        gc.collect()  # destroys the reducer before its process group
        dist.destroy_process_group(self.group)

    def try_to(self, attempt: Callable[[Replica], object]) -> None:
        """Run `attempt` on the replica, on all ranks."""

        def run() -> None:
            assert self.replica is not None
            attempt(self.replica)

        if self.problem is None:
            self.problem = problem_of(run)

    def _evaluate(self) -> None:
        """Add a point with the held-out loss, averaged over ranks whose models differ."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        loss = torch.zeros(1, dtype=torch.float64)
        # Only local work is attempted: a rank that fails must not miss a collective of the others.
        self.try_to(lambda replica: loss.fill_(replica.loss_on(self.task.held_out(rank, world_size))))
        if self.problem is None:
            dist.all_reduce(loss)
            self.points.append(Point(self.steps, self.seconds, loss.item() / world_size))

    def advance(self) -> None:
        """Train one slice and evaluate the loss."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        steps = range(self.steps, self.steps + self.task.slice_steps)
        batches = [self.task.batch(self.seed, step, rank, world_size) for step in steps]
        seconds = 0.0

        def train(replica: Replica) -> None:
            nonlocal seconds
            start_s = time.perf_counter()
            for step, batch in zip(steps, batches, strict=True):
                replica.step(batch, self.task.lr_at(step))
            if steps.stop >= self.task.patience * self.task.steps:
                replica.end()
            seconds = time.perf_counter() - start_s

        before = quiet_count() if self.over_link else 0
        self.try_to(train)
        if self.problem is not None:
            return
        assert self.replica is not None
        if self.over_link:
            self.sent_bytes = (self.sent_bytes or 0) + quiet_count() - before
        else:
            self.sent_bytes = self.replica.sent_bytes
        slowest_s = largest(seconds)
        self.step_seconds.append(slowest_s / len(steps))
        self.seconds += slowest_s
        self.steps = steps.stop
        self._evaluate()

    def is_done(self, target: float) -> bool:
        """Whether it has reached the loss, failed, or run out of patience."""
        late = self.steps >= self.task.patience * self.task.steps
        return late or self.problem is not None or arrival(self.points, target) is not None

    def result(self) -> dict[str, object]:
        """Its measurements, the same on every rank; bytes are those of the rank that sent most."""
        if self.problem is not None:
            return {"error": self.problem}
        sent = largest(float("nan") if self.sent_bytes is None else self.sent_bytes / self.steps)
        return {
            "points": [[point.steps, point.seconds, point.loss] for point in self.points],
            "step_seconds": self.step_seconds,
            "bytes_per_step": sent if sent == sent else None,
        }


@contextlib.contextmanager
def racers_of(
    names: Sequence[str], task: Task, seed: int, timeout_s: float, *, over_link: bool
) -> Iterator[list[Racer]]:
    """The methods with fresh models, destroyed after the block."""
    with contextlib.ExitStack() as stack:
        racers = []
        for name in names:
            racers.append(Racer(name, task, seed, timeout_s, over_link=over_link))
            stack.callback(racers[-1].close)
        yield racers


def race(racers: Sequence[Racer], report: Report) -> float:
    """Train all methods in turn until each is done. Returns the target: the loss that the reference reaches."""
    leader = next(racer for racer in racers if racer.name == REFERENCE)
    # Unless the schedule ends, one slice more than is reported: smoothing needs a neighbor.
    total = leader.task.steps + (leader.task.slice_steps if leader.task.patience > 1 else 0)
    while leader.steps < total:
        # No method gets more than a slice ahead, so that the machine's drift affects all alike.
        for racer in racers:
            if racer.problem is None:
                racer.advance()
        if leader.problem is not None:
            raise RuntimeError(f"{REFERENCE}, which sets the target loss, failed: {leader.problem}")
        report(leader.steps, total)
    target = target_of(leader.points)
    while waiting := [racer for racer in racers if not racer.is_done(target)]:
        for racer in waiting:
            racer.advance()
    return target
