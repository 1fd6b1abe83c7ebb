"""The command line of `python -m benchmarks.slow_link`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.slow_link.bounds import NAMES
from benchmarks.slow_link.job import RANKS_PER_HOST, RATE, SLICE_STEPS, STEPS, TARGET_METHOD, SlowLinkJob
from benchmarks.slow_link.plot import save_slow_link
from benchmarks.slow_link.report import markdown
from benchmarks.slow_link.run import run
from benchmarks.training.arguments import choose_methods, load_document
from benchmarks.two_hosts.network import parse_rate
from torchddp.bench.report import write_document
from torchddp.harness.command import check_output, make_console, run_app
from torchddp.harness.variants import ArgumentError

MAX_RANKS_PER_HOST = 8
MAX_STEPS = 10_000

HELP = """Measure each method's seconds to a target loss, on two hosts with a slow link between them.

Two network namespaces on this machine, connected by a rate-limited veth pair. Every method trains its own replica of a
small GPT on Python's source files; they take turns in one launch. Needs root and the programs ip and tc; leaves nothing
behind.

\b
Examples:
  python -m benchmarks.slow_link
      100 Mbit/s, two ranks per host, about eight minutes
  python -m benchmarks.slow_link --methods exact,powersgd --steps 20
      a quick run of two methods and torch DDP
  python -m benchmarks.slow_link --output result.json --plot result.png
      keep the numbers, and a plot
  python -m benchmarks.slow_link --show result.json
      the tables of a saved run, in markdown
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    rate: Annotated[str, typer.Option(help="Bandwidth of the link, each way, like 100mbit or 1gbit.")] = RATE,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks per host.")] = RANKS_PER_HOST,
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}; {TARGET_METHOD} always runs.")] = "",
    steps: Annotated[int, typer.Option(help=f"Steps of {TARGET_METHOD}; its loss then is the target.")] = STEPS,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG file.")] = None,
    show: Annotated[Path | None, typer.Option(help="Print a saved run's tables in markdown and stop.")] = None,
) -> None:
    if show is not None:
        print(markdown(load_document(show, "slow_link")))
        return
    if not 1 <= ranks_per_host <= MAX_RANKS_PER_HOST:
        raise ArgumentError(f"--ranks-per-host must be 1 to {MAX_RANKS_PER_HOST}, not {ranks_per_host}.")
    if not SLICE_STEPS <= steps <= MAX_STEPS:
        raise ArgumentError(f"--steps must be {SLICE_STEPS} to {MAX_STEPS}, not {steps}.")
    chosen = choose_methods(methods, NAMES, always=(TARGET_METHOD,))
    check_output(output, "--output", folder=False)
    check_output(plot, "--plot", folder=False)
    console = make_console()
    job = SlowLinkJob(chosen, 2 * ranks_per_host, ranks_per_host, steps, seed)
    document = run(job, parse_rate(rate), context.obj["command"], console)
    write_document(document, output, None, console)
    if plot is not None:
        save_slow_link(document["results"][0], plot)
        console.print(f"wrote {plot}")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.slow_link", arguments)
