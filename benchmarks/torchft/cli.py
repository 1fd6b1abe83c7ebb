"""Kill and heal replicas under torchft, or compare step time with torchft's class."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.torchft.run import KINDS, Run, run_once
from benchmarks.torchft.step_time import measure, report


def torchft_version() -> str:
    """The installed torchft version. RuntimeError if there is none."""
    for package in ("torchft", "torchft-nightly"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    raise RuntimeError("torchft is not installed: pip install torchft")


def main() -> None:
    """Prints a table of runs or step times; exit status 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torchft", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, help="runs in which one of two replicas is killed and healed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="model; pure is PureDistributedDataParallel")
    parser.add_argument("--step-time", action="store_true", help="compare step time with torchft's class instead")
    parser.add_argument("--steps", type=int, default=60, help="measured steps per class (--step-time)")
    parser.add_argument("--model-mb", type=float, default=25.0, help="MB of gradients (--step-time)")
    parser.add_argument("--caps", type=float, nargs="*", default=[], help="more bucket_cap_mb values (--step-time)")
    parser.add_argument("--logs", type=Path, default=Path("build/torchft"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(torchft_version())
    if arguments.step_time:
        times = measure(arguments.steps, arguments.model_mb, arguments.caps, arguments.logs)
        print(report(times))
        _save(arguments.json, {"torchft": torchft_version(), "step_time": times})
        return
    runs = []
    print("seed  dies in killed at resumed s healed s discarded  steps  weights")
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        runs.append(run_once(seed, arguments.logs, kind=arguments.kind))
        print(_line(runs[-1]), flush=True)
    good = sum(run.ok for run in runs)
    print(f"{good} of {len(runs)} runs ended with equal weights")
    _save(arguments.json, {"torchft": torchft_version(), "runs": [run.as_dict() for run in runs]})
    sys.exit(good != len(runs))


def _line(run: Run) -> str:
    end = f"equal, {run.checksums[0]}" if run.ok else f"FAILED: {run.problem}"
    return (
        f"{run.seed:>4} {run.phase:>8} {run.killed_at_step:>9} {run.resumed_s:>9.2f} {run.healed_s:>8.2f} "
        f"{run.discarded:>9} {run.steps:>6}  {end}"
    )


def _save(path: Path | None, data: object) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n")
