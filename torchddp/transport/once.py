"""What a job says once, whichever of its processes come to it first."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_said: set[str] = set()  # by this process, so that its further models ask no store


def is_first_in_job(what: str, process_group: dist.ProcessGroup) -> bool:
    """Whether this process is to say ``what``: rank 0 of the group is, and only if no group of the job has.

    Ranks of a job are those of the default process group, whose store counts; without one they are this process alone.
    What was started anew (by torchrun, after a failure) is another job. Not collective: only ranks 0 ask the store.
    """
    if process_group.rank() != 0 or what in _said:
        return False
    _said.add(what)
    key = f"torchddp/said/{hashlib.sha256(what.encode()).hexdigest()}"
    try:
        return bool(_get_default_store().add(key, 1) == 1)
    except (ValueError, RuntimeError, AttributeError):  # there is no default group, its store is gone, it has none
        return True
