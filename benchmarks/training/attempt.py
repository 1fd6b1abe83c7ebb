"""A method that fails is out, with the reason, on all ranks at once. Collective."""

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

# Of the time limit of the group that all ranks share: a rank that others have left alone in a method's group must
# give up before they give up on it.
GROUP_SHARE = 0.4


def problem_of(attempt: Callable[[], object]) -> str | None:
    """Run it on every rank; None where all succeeded, else what the first rank with an error said."""
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
    """A method with a process group of its own. Out of the run once `problem` says why."""

    name: str
    group: dist.ProcessGroup
    replica: Replica | None = None
    problem: str | None = None
    # What has been trained so far, for whoever drives it.
    steps: int = field(default=0)

    def try_to(self, attempt: Callable[[Replica], object]) -> bool:
        """Do it to the replica, on all ranks; whether it worked."""
        if self.problem is None:
            self.problem = problem_of(lambda: attempt(self._built))
        return self.problem is None

    def held_out_loss(self, task: Task) -> float | None:
        """Over the whole evaluation set; ranks whose models differ are averaged. None if the method is out."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        loss = torch.zeros(1, dtype=torch.float64)
        # Only what ranks do by themselves is attempted: one that fails must not miss a collective of the others.
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
    """The method built around a fresh model, or with the problem it had; it goes with the block."""
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
        gc.collect()  # the reducer goes before the group that it talks through
        dist.destroy_process_group(group)
