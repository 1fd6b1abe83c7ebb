"""Named checks that a DistributedDataParallel class must pass.

Each takes the class and the rank, runs on every rank of a process group of two, and raises if the class misbehaves.
The ordinary tests run them on the class under test, the mutant tests on deliberately broken classes. To keep ranks in
step when a check fails, a check makes its collective calls first and asserts afterwards.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from tests import behaviors_grads, behaviors_options
from tests.harness import GROUP_TIMEOUT_S, attempt, keep_until_exit, process_group, run_outcomes

WORLD_SIZE = 2
BEHAVIORS = {
    name.removeprefix("check_"): check
    for name, check in [*vars(behaviors_grads).items(), *vars(behaviors_options).items()]
    if name.startswith("check_")
}
# Checks that torch's own class fails.
BEYOND_TORCH = {"logging_data_of_a_static_graph"}


def results_of(
    ddp_class: type,
    names: Iterable[str],
    folder: Path,
    timeout_s: float = GROUP_TIMEOUT_S,
    enough_failures: int | None = None,
) -> dict[str, str | None]:
    """Run checks; return the traceback of the first rank that each failed on, or None, by name.

    One launch runs all checks until `enough_failures` have failed. If a check kills a rank (gloo terminates on
    mismatched collectives), a new launch continues with the next check.
    """
    results: dict[str, str | None] = {}
    while left := [name for name in names if name not in results]:
        log = folder / f"log_{len(left)}_"
        options = (ddp_class, left, log, timeout_s, enough_failures)
        outcomes = run_outcomes(_run_on_rank, WORLD_SIZE, *options, straggler_s=2.0)
        found = _read_logs(log)
        results |= found
        if all(outcome.ok for outcome in outcomes):
            break
        assert found, "\n".join(f"rank {outcome.rank}: {outcome.error}" for outcome in outcomes)
    return results


def _run_on_rank(
    rank: int, ddp_class: type, names: list[str], log_path: Path, timeout_s: float, enough_failures: int | None
) -> None:
    """Run each check in its own process group; each rank logs results as it goes."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    failures = 0
    with open(f"{log_path}{rank}", "w", buffering=1) as log:
        for name in names:
            log.write(json.dumps([name, "died in this check"]) + "\n")
            torch.manual_seed(0)
            with process_group(dist.PrefixStore(name, store), rank, WORLD_SIZE, timeout_s) as group:
                _, error = attempt(BEHAVIORS[name], ddp_class, rank)
                if error is None:
                    keep_until_exit(group)
            log.write(json.dumps([name, error]) + "\n")
            # No rank starts the next check before all have finished this one and know whether it failed.
            store.set(f"{name}/{rank}", "failed" if error else "ok")
            failures += b"failed" in [store.get(f"{name}/{peer}") for peer in range(WORLD_SIZE)]
            if failures == enough_failures:
                return


def _read_logs(log_path: Path) -> dict[str, str | None]:
    merged: dict[str, str | None] = {}
    for rank in range(WORLD_SIZE):
        lines = Path(f"{log_path}{rank}").read_text().splitlines()
        for name, error in dict(map(json.loads, lines)).items():
            merged[name] = merged.get(name) or error
    return merged
