"""The command `python -m tests.fuzz`. Tests import it, so it leaves the environment alone."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from tests.fuzz.draw import TRANSPORTS, draw
from tests.fuzz.run import run_trials
from tests.harness import class_under_test
from tests.shm_backend import BACKEND

EPILOG = """examples:
  python -m tests.fuzz --trials 1000 --seed 7
      more, and other ones
  python -m tests.fuzz --seed 7 --trial 41
      one of them again
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
    parser.add_argument("--backend", default="gloo", choices=("gloo", BACKEND), help="of our process group")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"wants a positive number, not {text}")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    trials = range(options.trials) if options.trial is None else [options.trial]
    drawn = {trial: draw(options.seed, trial, options.world_size, options.transport) for trial in trials}
    programs = {trial: replace(program, backend=options.backend) for trial, program in drawn.items()}
    if options.trial is not None:
        print(programs[options.trial].text(), file=sys.stderr)
    failed = wanted = 0
    for done, result in enumerate(run_trials(programs, class_under_test()), 1):
        failed += result.failed
        wanted += result.wanted is not None
        if result.failed:
            print(f"{result.text()}\n  repeat: {command(options, result.trial)}", file=sys.stderr)
        elif sys.stderr.isatty():
            print(f"{done} of {len(programs)} trials", end="\r", file=sys.stderr)
    ends = f", {wanted} by intent" if wanted else ""
    print(f"{len(programs)} trials, {failed} failed (seed {options.seed}){ends}")
    return int(failed > 0)


def command(options: argparse.Namespace, trial: int) -> str:
    """The command that repeats a trial."""
    given = {"seed": options.seed, "trial": trial, "world-size": options.world_size, "transport": options.transport}
    given["backend"] = options.backend
    return " ".join(["python -m tests.fuzz", *(f"--{k} {v}" for k, v in given.items() if v is not None)])
