"""Worker side: who measures which case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchddp.bench.cases import Job
from torchddp.bench.collective.measure import time_operation
from torchddp.bench.memory import measure_memory
from torchddp.bench.overlap.measure import time_overlap
from torchddp.bench.startup.measure import time_startup
from torchddp.bench.step_time.measure import time_training
from torchddp.bench.timing import Report, time_model
from torchddp.harness.trial import prove

# By case: what a rank does for one model, or one collective.
MEASURES: dict[str, Callable[[Job, str, Report], dict[str, Any]]] = {
    "step_time": time_training,
    "overlap": time_overlap,
    "collective": time_operation,
    "startup": time_startup,
    "memory": measure_memory,
    "scaling": time_training,
    "per_param": time_model,
    "exposed": time_model,
}


def prove_models(job: Job) -> None:
    """Find what is wrong with a user's model before anything is timed; ArgumentError."""
    for name in job.models:
        if ":" in name:
            prove(name, job.seed)
