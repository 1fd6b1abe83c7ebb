"""The worker of each rank: times every variant in turn and profiles our default. Never outlives its command."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.links.field import OUR_DEFAULT, PLANNED
from benchmarks.two_hosts.worker import serve_inherited
from torchddp.bench.cases import Job
from torchddp.harness.launch import Reporter

# Planning ends after eight synchronized steps.
PLANNING_STEPS = 10


def measure(job: Job, rank: int, channel: Connection) -> list[dict[str, Any]]:
    """Time every model, and record the profile for the simulator."""
    from torchddp.bench.timing import build_runners, time_runners
    from torchddp.ddp.module import DistributedDataParallel
    from torchddp.harness.models import make_batch
    from torchddp.plan.record_profile import record_profile

    results = []
    for model in job.models:
        runners = {runner.variant.name: runner for runner in build_runners(job, model)}
        planned, ours = runners[PLANNED], runners[OUR_DEFAULT]
        assert isinstance(planned.module, DistributedDataParallel) and isinstance(ours.module, DistributedDataParallel)
        batch = make_batch(model, job.seed, rank, 0)
        for _ in range(PLANNING_STEPS):
            planned.step(batch)
        assert not planned.module.observers.get("bucket_planning").is_under_way
        timed = time_runners(job, model, list(runners.values()), Reporter(channel, model, enabled=rank == 0))
        profile = record_profile(ours.module, lambda ours=ours, batch=batch: ours.step(batch), name=model)  # type: ignore[misc]
        results.append(
            {
                **timed,
                "profile": profile,
                "planned_bytes": [bucket.nbytes for bucket in planned.module.reducer.plan.buckets],
                "transport": planned.module.reducer.transport_name,
            }
        )
    return results


if __name__ == "__main__":
    serve_inherited(int(sys.argv[1]), measure)
