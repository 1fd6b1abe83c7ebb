"""Plans on disk, by what they were measured for: the model, the group and what carries its buckets."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchddp import _C
from torchddp.planner.plan import Buckets, plan_of

logger = logging.getLogger("torchddp.distributed")

CACHE_ENV = "TORCHDDP_CACHE_DIR"
FORMAT = 1
_KIND = "torchddp bucket plan"


class PlanCacheError(ValueError):
    """A cached plan that cannot be used; the message is one sentence."""


def fingerprint(specs: Sequence[_C.ParamSpec], device_type: str) -> str:
    """Of names, sizes, dtypes, devices and layouts of the parameters that are reduced, in their order."""
    text = json.dumps([device_type, [[s.name, s.numel, s.itemsize, s.dtype, s.device, s.sparse] for s in specs]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """``TORCHDDP_CACHE_DIR``, or ``torchddp`` in the user's cache folder."""
    if chosen := os.environ.get(CACHE_ENV):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchddp"


def plan_path(model: str, world_size: int, transport: str) -> Path:
    """Where the plan of a model (its fingerprint) on such a group is kept."""
    return cache_folder() / f"plan-{model}-{world_size}-{transport}.json"


def save_plan(path: Path, buckets: Buckets, model: str, world_size: int, transport: str, measured: Any) -> None:
    """Keep a plan. ``measured``: what it is based on, for people."""
    document = {
        "format": FORMAT,
        "kind": _KIND,
        "fingerprint": model,
        "world_size": world_size,
        "transport": transport,
        "buckets": [list(bucket) for bucket in buckets],
        "measured": measured,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # In one piece: another process may read it at the same time.
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def load_plan(path: Path, model: str, world_size: int, transport: str) -> Buckets | None:
    """The plan kept there; None if there is none. PlanCacheError if it is damaged or was made for something else."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PlanCacheError(f"The cached plan '{path}' can't be read ({error}); delete it or tune again.") from error
    wanted = {
        "kind": _KIND,
        "format": FORMAT,
        "fingerprint": model,
        "world_size": world_size,
        "transport": transport,
    }
    found = document if isinstance(document, dict) else {}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise PlanCacheError(
                f"The cached plan '{path}' does not fit: its {key} is {found.get(key)!r}, here it is {value!r}; delete "
                "it or tune again."
            )
    try:
        return tuple(tuple(int(index) for index in bucket) for bucket in found["buckets"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanCacheError(f"The cached plan '{path}' is damaged ({error!r}); delete it or tune again.") from error


def kept_plan(specs: Sequence[_C.ParamSpec], device_type: str, transport: _C.Transport) -> _C.BucketPlan | None:
    """The plan kept for this model and group, or None; one that can't be used is a warning and counts as none."""
    model = fingerprint(specs, device_type)
    path = plan_path(model, transport.size, transport.name)
    try:
        buckets = load_plan(path, model, transport.size, transport.name)
        plan = None if buckets is None else plan_of(buckets, specs)
    except ValueError as error:
        logger.warning("bucket_cap_mb='auto' measures anew: %s", error)
        return None
    if plan is not None:
        logger.info("bucket_cap_mb='auto': %d buckets, as kept in %s", len(plan), path)
    return plan
