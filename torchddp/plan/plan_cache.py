"""Saves plans on disk by model, process group and transport."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torchddp import _C
from torchddp._extension import CACHE_ENV, user_cache
from torchddp.plan.buckets import Buckets
from torchddp.whole_file import read_json, write_whole

logger = logging.getLogger("torchddp.distributed")

FORMAT = 1
_KIND = "torchddp bucket plan"


class PlanCacheError(ValueError):
    """A saved plan that can't be used; the message is one sentence."""


def fingerprint(specs: Sequence[_C.ParamSpec], device_type: str) -> str:
    """A hash of the reduced parameters' names, sizes, dtypes, devices and layouts, in their order."""
    text = json.dumps([device_type, [[s.name, s.numel, s.itemsize, s.dtype, s.device, s.sparse] for s in specs]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PlanKey:
    fingerprint: str  # of the model
    world_size: int
    ranks_per_host: int
    transport: str
    backend: str  # of the process group

    @property
    def path(self) -> Path:
        """The file of such a plan. PlanCacheError if there is no folder for it."""
        group = f"{self.world_size}-{self.ranks_per_host}-{self.transport}-{self.backend}"
        if (folder := user_cache()) is None:
            where = f"set {CACHE_ENV} to one"
            raise PlanCacheError(f"There is no folder for plans, since there is no home directory; {where}.")
        return folder / f"plan-{self.fingerprint}-{group}.json"


def save_plan(path: Path, buckets: Buckets, key: PlanKey, measured: object) -> None:
    """Save a plan. ``measured``: what it is based on, for readers of the file. OSError if it can't be written."""
    document = {"format": FORMAT, "kind": _KIND, **asdict(key), "buckets": buckets, "measured": measured}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1, allow_nan=False) + "\n")  # another process may be reading it


def load_plan(path: Path, key: PlanKey) -> Buckets | None:
    """Load a saved plan; None if there is none. PlanCacheError if it is damaged or was made for another key."""
    try:
        document = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PlanCacheError(f"The cached plan '{path}' can't be read ({error}); delete it or tune again.") from error
    found = document if isinstance(document, dict) else {}
    for name, value in {"kind": _KIND, "format": FORMAT, **asdict(key)}.items():
        if found.get(name) != value:
            fit = f"its {name} is {found.get(name)!r}, here it is {value!r}"
            raise PlanCacheError(f"The cached plan '{path}' does not fit: {fit}; delete it or tune again.")
    buckets = found.get("buckets")
    if not isinstance(buckets, list) or not all(
        isinstance(bucket, list) and all(isinstance(index, int) and 0 <= index < 2**31 for index in bucket)
        for bucket in buckets
    ):
        raise PlanCacheError(f"The cached plan '{path}' is damaged: its buckets are not lists of indices; tune again.")
    return tuple(tuple(bucket) for bucket in buckets)


def kept_plan(specs: Sequence[_C.ParamSpec], key: PlanKey) -> _C.BucketPlan | None:
    """The plan saved for this model and group, or None. Warns about a plan that can't be used, and ignores it."""
    try:
        path = key.path
        buckets = load_plan(path, key)
        plan = None if buckets is None else _C.BucketPlan(buckets, specs)
    except ValueError as error:
        logger.warning("bucket_cap_mb='auto' ignores a saved plan and measures again: %s", error)
        return None
    if plan is not None:
        logger.info("bucket_cap_mb='auto': %d buckets from the saved plan %s", len(plan), path)
    return plan
