"""Named checks of what a DistributedDataParallel class must do.

Each takes the class and the rank, runs on every rank inside a process group of two, and raises if the class behaves
otherwise. The ordinary tests run them on the class under test, the mutant tests on deliberately broken classes. To keep
ranks in step when a check fails, a check makes its collective calls first and asserts afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests import behaviours_grads, behaviours_options, behaviours_state
from tests.harness import GROUP_TIMEOUT_S, attempt, keep_until_exit, process_group

Check = Callable[[type, int], None]


@dataclass(frozen=True)
class Behaviour:
    """A check with its name; `beyond_torch` says what torch's own class lacks for it."""

    name: str
    check: Check
    beyond_torch: str | None = None


def _collect_behaviours() -> dict[str, Behaviour]:
    found = {}
    for module in (behaviours_grads, behaviours_options, behaviours_state):
        for name, check in vars(module).items():
            if name.startswith("check_"):
                short = name.removeprefix("check_")
                found[short] = Behaviour(short, check, getattr(check, "beyond_torch", None))
    return found


BEHAVIOURS = _collect_behaviours()


def run_behaviours(
    rank: int,
    ddp_class: type,
    names: Iterable[str],
    log_path: Path,
    timeout_s: float = GROUP_TIMEOUT_S,
    enough_failures: int | None = None,
) -> None:
    """Runs checks one after the other, each in a process group of its own, until `enough_failures` have failed.

    To be called on all ranks by `run_ranks`, whose own group is replaced by those of the checks. Each rank writes to a
    log of its own as it goes, because a broken class can take its process down (gloo terminates on mismatched
    collectives).
    """
    store = dist.distributed_c10d._get_default_store()
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    failures = 0
    with open(f"{log_path}{rank}", "w", buffering=1) as log:
        for name in names:
            log.write(json.dumps([name, "died in this check"]) + "\n")
            error = _run_one(rank, world_size, ddp_class, BEHAVIOURS[name], store, timeout_s)
            log.write(json.dumps([name, error]) + "\n")
            # No rank starts the next check before all are done with this one, and all know whether one failed.
            store.set(f"{name}/{rank}", "failed" if error else "ok")
            failures += b"failed" in [store.get(f"{name}/{peer}") for peer in range(world_size)]
            if enough_failures is not None and failures >= enough_failures:
                return


def read_logs(log_path: Path, world_size: int) -> dict[str, str | None]:
    """What the ranks wrote: check -> traceback of the first rank it failed on, or None; only checks that were begun."""
    merged: dict[str, str | None] = {}
    for rank in range(world_size):
        lines = Path(f"{log_path}{rank}").read_text().splitlines()
        for name, error in dict(map(json.loads, lines)).items():
            merged[name] = merged.get(name) or error
    return merged


def _run_one(
    rank: int, world_size: int, ddp_class: type, behaviour: Behaviour, store: dist.Store, timeout_s: float
) -> str | None:
    torch.manual_seed(0)
    with process_group(dist.PrefixStore(behaviour.name, store), rank, world_size, timeout_s) as group:
        _, error = attempt(behaviour.check, ddp_class, rank)
        if error is None:
            keep_until_exit(group)
    return error
