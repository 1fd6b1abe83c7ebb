"""Entry point of `python -m tests.fuzz`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Before torch: the ranks share few cores, and its warnings about programs as odd as these are of no use.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from rich.console import Console  # noqa: E402
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402

from tests.fuzz import report  # noqa: E402
from tests.fuzz.batches import TRIAL_LIMIT_S, Result, run_trials  # noqa: E402
from tests.fuzz.draw import TRANSPORTS, draw  # noqa: E402
from tests.harness import class_under_test  # noqa: E402

EPILOG = """examples:
  python -m tests.fuzz
      60 trials
  python -m tests.fuzz --trials 1000 --seed 7 --json fuzz.json
      more, other ones, and all differences in a file
  python -m tests.fuzz --seed 7 --trial 41
      one of them again
  python -m tests.fuzz --world-size 2 --transport c10d
      all with two ranks, through the process group
  TORCHDDP_TEST_CLASS=torch.nn.parallel.DistributedDataParallel python -m tests.fuzz
      torch's class against itself: nothing may fail

Exit status: 0, or 1 if a trial failed.
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Random training programs with torch's DistributedDataParallel and with ours, side by side in the "
        "same ranks. After every operation parameters, gradients, kept gradients, buffers, losses and exceptions are "
        "compared: bit for bit up to two ranks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trials", type=_positive, default=60, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all programs (default: %(default)s)")
    parser.add_argument("--trial", type=int, help="run this one of them alone, and print its program")
    parser.add_argument("--world-size", type=_positive, help="ranks in every trial (default: 1 to 4)")
    parser.add_argument("--transport", choices=TRANSPORTS, help="of ours, in every trial (default: either)")
    parser.add_argument("--limit", type=_positive, default=int(TRIAL_LIMIT_S), help="seconds for some trials together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all differences to this file")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a positive number, not {text}")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    asked = report.Asked(options.seed, options.world_size, options.transport)
    trials = range(options.trials) if options.trial is None else [options.trial]
    programs = {trial: draw(options.seed, trial, options.world_size, options.transport) for trial in trials}
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if options.trial is not None:
        console.print(programs[options.trial].text(), markup=False)
    results: list[Result] = []
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn by hand: ranks are forked from this process, which must have no thread that may hold a lock.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("trials", total=len(programs))
        for result in run_trials(programs, class_under_test(), float(options.limit)):
            results.append(result)
            if result.failed:
                progress.console.print(report.failure(result, asked), markup=False)
            failed = sum(r.failed for r in results)
            progress.update(
                task, advance=1, description=f"trials, {failed} failed" if failed else "trials", refresh=True
            )
    print(report.summary(results, asked))
    if options.json is not None:
        options.json.write_text(json.dumps(report.document(results, asked), indent=1) + "\n")
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
