"""Messages that a job prints once, whichever of its processes is first."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_said: set[str] = set()  # by this process, so that later models don't ask a store


def is_first_in_job(what: str, process_group: dist.ProcessGroup) -> bool:
    """Whether this process should say ``what``: true on rank 0 of the group if no group of the job has said it yet.

    The ranks of a job are those of the default process group, whose store counts; without one, this process is the job.
    A restart (by torchrun, after a failure) is a new job. Not collective: only rank 0 of each group asks the store.
    """
    if process_group.rank() != 0 or what in _said:
        return False
    _said.add(what)
    key = f"torchddp/said/{hashlib.sha256(what.encode()).hexdigest()}"
    try:
        return bool(_get_default_store().add(key, 1) == 1)
    except (ValueError, RuntimeError, AttributeError):  # no default group, or its store is gone or missing
        return True
