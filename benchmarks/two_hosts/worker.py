"""The worker of each rank, in its host's namespace. It never outlives the command that started it."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from torchddp.bench.cases import Job
from torchddp.harness.launch import Measure, Reporter, serve_rank


def _die_with_parent(channel: Connection) -> None:
    # Nothing is sent in this direction after the job, so readable means that the other end is gone.
    channel.poll(None)
    os._exit(1)


def measure(job: Job, rank: int, channel: Connection) -> list[dict[str, Any]]:
    """Time every model, then count the bytes that its variants send."""
    from benchmarks.two_hosts.traffic import sent_bytes, transport_of
    from torchddp.bench.timing import build_runners, time_runners

    results = []
    for model in job.models:
        runners = build_runners(job, model)
        timed = time_runners(job, model, runners, Reporter(channel, model, enabled=rank == 0))
        results.append({**timed, "sent_bytes": sent_bytes(job, model, runners), "transport": transport_of(runners)})
    return results


def serve_inherited(descriptor: int, measure: Measure) -> None:
    """Take the job from the inherited connection and serve it."""
    channel = Connection(descriptor)
    rank, job, init_method = channel.recv()
    threading.Thread(target=_die_with_parent, args=(channel,), daemon=True).start()
    serve_rank(rank, job, init_method, channel, measure)


if __name__ == "__main__":
    serve_inherited(int(sys.argv[1]), measure)
