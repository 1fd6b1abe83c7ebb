"""Drops a failing method, with the reason, on all ranks at once. Collective."""

from __future__ import annotations

import contextlib
import datetime
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.training.methods import METHODS, Setup
from benchmarks.training.outer_steps import OuterSteps
from benchmarks.training.replica import Replica
from benchmarks.training.tasks import Task

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


@dataclass
class Entrant:
    """A method with its own process group. Once `problem` is set, it is out of the run."""

    name: str
    group: dist.ProcessGroup
    replica: Replica | None = None
    problem: str | None = None
    # Steps trained so far, maintained by the caller.
    steps: int = field(default=0)

    def try_to(self, attempt: Callable[[Replica], object]) -> bool:
        """Run `attempt` on the replica, on all ranks; returns whether it succeeded."""
        if self.problem is None:
            self.problem = problem_of(lambda: attempt(self._built))
        return self.problem is None

    def held_out_loss(self, task: Task) -> float | None:
        """Loss over the whole evaluation set, averaged over ranks whose models differ. None if the method is out."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        loss = torch.zeros(1, dtype=torch.float64)
        # Only local work is attempted: a rank that fails must not miss a collective of the others.
        if not self.try_to(lambda replica: loss.fill_(replica.loss_on(task.held_out(rank, world_size)))):
            return None
        dist.all_reduce(loss)
        return loss.item() / world_size

    @property
    def _built(self) -> Replica:
        assert self.replica is not None
        return self.replica


@contextlib.contextmanager
def entrant(name: str, task: Task, seed: int, outer: OuterSteps, timeout_s: float) -> Iterator[Entrant]:
    """Yields the method built around a fresh model, or the problem that it had; destroys it after the block."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=GROUP_SHARE * timeout_s))
    assert group is not None
    found = Entrant(name, group)

    def build() -> None:
        found.replica = METHODS[name].build(Setup(task, seed, group, outer))

    found.problem = problem_of(build)
    try:
        yield found
    finally:
        if found.replica is not None:
            found.replica.close()
        found.replica = None
        gc.collect()  # destroys the reducer before its process group
        dist.destroy_process_group(group)
