"""The command line of `python -m benchmarks.convergence`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.convergence.bounds import NAMES, REFERENCE
from benchmarks.convergence.job import ConvergenceJob
from benchmarks.convergence.plot import save_convergence
from benchmarks.convergence.report import markdown
from benchmarks.convergence.run import run
from benchmarks.training.arguments import choose_methods, load_document
from torchddp.bench.report import write_document
from torchddp.harness.command import check_output, make_console, run_app
from torchddp.harness.variants import ArgumentError

ALL_TASKS = ("gpt", "digits")
MAX_SEEDS = 20

HELP = """Measure how compressed and infrequent communication affect the loss: two ranks train with each method in turn.

A small GPT on Python's source files and a perceptron on scikit-learn's digits. Every method starts from the same
weights and sees the same data in the same order.

\b
Examples:
  python -m benchmarks.convergence
      both tasks, three seeds, about six minutes
  python -m benchmarks.convergence --task digits --methods int8,powersgd --seeds 1
      a quick run of two methods and the reference
  python -m benchmarks.convergence --output result.json --plot result.png
      keep the numbers, and a plot
  python -m benchmarks.convergence --show result.json
      the tables of a saved run, in markdown
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def parse_task(text: str) -> tuple[str, ...]:
    """'all' -> both."""
    if text == "all":
        return ALL_TASKS
    if text not in ALL_TASKS:
        raise ArgumentError(f"--task: there is no '{text}'; choose from {', '.join(ALL_TASKS)}, all.")
    return (text,)


def check_installed(tasks: Sequence[str]) -> None:
    """Raises ArgumentError if the digits are requested but scikit-learn, which ships them, is missing."""
    if "digits" in tasks and importlib.util.find_spec("sklearn") is None:
        raise ArgumentError("--task digits needs scikit-learn: pip install scikit-learn, or --task gpt.")


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(ALL_TASKS)}, all.")] = "all",
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}; {REFERENCE} always runs.")] = "",
    seeds: Annotated[int, typer.Option(help="Runs of each method, with different weights and batches.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Run a few steps, to check that everything works.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this PNG file.")] = None,
    show: Annotated[Path | None, typer.Option(help="Print a saved run's tables in markdown and stop.")] = None,
) -> None:
    if show is not None:
        print(markdown(load_document(show, "convergence")))
        return
    tasks = parse_task(task)
    if not 1 <= seeds <= MAX_SEEDS:
        raise ArgumentError(f"--seeds must be 1 to {MAX_SEEDS}, not {seeds}.")
    chosen = choose_methods(methods, NAMES, always=(REFERENCE,))
    check_output(output, "--output", folder=False)
    check_output(plot, "--plot", folder=False)
    check_installed(tasks)
    console = make_console()
    document = run(ConvergenceJob(tasks, chosen, seeds, quick), context.obj["command"], console)
    write_document(document, output, None, console)
    if plot is not None:
        save_convergence(document["results"], plot)
        console.print(f"wrote {plot}")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.convergence", arguments)
