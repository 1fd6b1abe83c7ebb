"""Worker side of the case: steps as they are, and steps in which nothing is computed, interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchddp.bench.cases import Job
from torchddp.bench.overlap.replay import Replay
from torchddp.bench.timing import Report, Runner, build_runners, check_gradients, over_ranks, timed_rounds, wrap_copies
from torchddp.bench.timing import warm_up as warm_up_runners
from torchddp.harness.models import describe_model, make_batch
from torchddp.harness.variants import Role


@dataclass
class ReplayRunner(Runner):
    """A variant around a model that computes nothing."""

    def step(self, batch: Any, world_size: int = 1) -> float:
        """As any step, but there is no batch."""
        return super().step((), world_size)


def build_replays(job: Job, runners: Sequence[Runner]) -> list[ReplayRunner]:
    """Every variant again, around a replay of the gradients that the bare model has on this rank."""
    local = next(runner for runner in runners if runner.variant.role is Role.LOCAL)
    original = Replay(local.module, (gradient for _, gradient in local.gradients()))
    modules = wrap_copies(original, job.variants, lambda cls, module, options: cls(module, **options))
    return [ReplayRunner(variant, module) for variant, module in zip(job.variants, modules, strict=True)]


def time_overlap(job: Job, model_name: str, report: Report) -> dict[str, Any]:
    """Steps and replays of all variants, after their gradients proved equal. The same dict on every rank."""
    rank = dist.get_rank()
    batch, other_batch = (make_batch(model_name, job.seed, rank, index) for index in (0, 1))
    runners = build_runners(job, model_name)
    warm_up_runners(runners, batch, job)
    replays = build_replays(job, runners)
    warm_up_runners(replays, batch, job)

    def check() -> None:
        check_gradients(job, model_name, runners, other_batch)
        check_gradients(job, model_name, replays, other_batch)

    check()
    samples = over_ranks(timed_rounds([*runners, *replays], batch, job, report), job)
    check()
    return {
        **describe_model(model_name, runners[0].module, job.seed),
        "step_ms": samples[: len(runners)],
        "replay_ms": samples[len(runners) :],
    }
