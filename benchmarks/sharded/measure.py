"""Worker side of the speed part: training steps of all variants, interleaved, after a check that they train alike."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.sharded.builders import build
from benchmarks.sharded.field import REFERENCE, missing_package
from benchmarks.sharded.proof import TOLERANCE, first_problem, training_error
from benchmarks.sharded.trainer import LEARNING_RATE, Trainer
from torchddp.bench.cases import Job
from torchddp.bench.timing import over_ranks, timed_rounds, warm_up
from torchddp.harness.launch import Reporter
from torchddp.harness.models import describe_model, find_model, make_batch, make_model
from torchddp.harness.variants import Role, Variant

PROOF_STEPS = 3


class WrongTrainingError(RuntimeError):
    """One of our variants fails, or trains to different weights than the reference, so its time is meaningless."""


@dataclass
class Contest:
    """All variants of one model in this process group, and those left out, each with the reason."""

    job: Job
    model: str
    trainers: list[Trainer] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def drop(self, variant: Variant, reason: str) -> None:
        """Leave a peer out; for our variants and the reference, raise an error."""
        if variant.role is Role.OURS or variant.name == REFERENCE:
            raise WrongTrainingError(f"'{variant.name}' on model '{self.model}': {reason}")
        self.left_out[variant.name] = reason
        self.trainers = [trainer for trainer in self.trainers if trainer.variant is not variant]

    def build_all(self) -> None:
        """Build a trainer for each variant, around a copy of one model."""
        original = make_model(self.model, self.job.seed)
        loss = find_model(self.model, self.job.seed).loss
        for variant in self.job.variants:

            def attempt(variant: Variant = variant) -> None:
                trainer = build(variant, copy.deepcopy(original))
                trainer.loss = loss
                self.trainers.append(trainer)

            package = missing_package(variant)
            reason = f"{package} is not installed" if package else first_problem(attempt)
            if reason:
                self.drop(variant, reason)

    def train(self, steps: int, first_batch: int) -> None:
        """Train every variant for `steps` steps, each on this rank's next batch."""
        rank = dist.get_rank()
        for trainer in tuple(self.trainers):
            for index in range(first_batch, first_batch + steps):
                batch = make_batch(self.model, self.job.seed, rank, index)
                problem = first_problem(lambda trainer=trainer, batch=batch: trainer.step(batch))  # type: ignore[misc]
                if problem:
                    self.drop(trainer.variant, problem)
                    break

    def compare(self, start: list[Tensor]) -> None:
        """Compare all variants' parameters with the reference's."""
        reference = next(trainer for trainer in self.trainers if trainer.variant.name == REFERENCE)
        want = reference.full_parameters()
        for trainer in tuple(self.trainers):
            error = training_error(trainer, want, start)
            self.errors[trainer.variant.name] = max(error, self.errors.get(trainer.variant.name, 0.0))
            if error > TOLERANCE:
                self.drop(trainer.variant, f"trains to different weights: off by {error:.2g} of the change by training")

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of all variants."""
        for trainer in self.trainers:
            trainer.set_learning_rate(rate)


def time_model(job: Job, model: str, report: Reporter) -> dict[str, Any]:
    """Step times of all variants on one model. All ranks return the same dict; samples are of the slowest rank.

    During timing the learning rate is zero: the work is the same, but weights and gradients do not drift toward
    values that are slow to compute with. Training continues afterwards, and must still agree.
    """
    contest = Contest(job, model)
    start = [p.detach().clone() for p in make_model(model, job.seed).parameters()]
    contest.build_all()
    contest.train(PROOF_STEPS, first_batch=0)
    contest.compare(start)
    contest.set_learning_rate(0.0)
    batch = make_batch(model, job.seed, dist.get_rank(), 0)
    warm_up(contest.trainers, batch, job)
    timed = list(contest.trainers)
    samples = over_ranks(timed_rounds(timed, batch, job, report), job)
    contest.compare(start)
    contest.set_learning_rate(LEARNING_RATE)
    contest.train(1, first_batch=PROOF_STEPS)
    contest.compare(start)
    step_ms = {trainer.variant.name: row for trainer, row in zip(timed, samples, strict=True)}
    return {
        **describe_model(model, make_model(model, job.seed), job.seed),
        "step_ms": {name: row for name, row in step_ms.items() if name not in contest.left_out},
        "left_out": contest.left_out,
        "training_errors": contest.errors,
    }


def measure(job: Job, rank: int, channel: Connection) -> list[dict[str, Any]]:
    """Every model in turn."""
    return [time_model(job, model, Reporter(channel, model, enabled=rank == 0)) for model in job.models]
