"""The command line of `python -m benchmarks.checks`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.checks.field import DEFAULT_MODELS, MODELS
from benchmarks.checks.run import Settings, run
from torchddp.bench.report import write_document
from torchddp.harness.command import check_numbers, check_output, make_console, run_app
from torchddp.harness.variants import ArgumentError

HELP = """Measure the cost of check_parameters_every and find_nonfinite: forward and backward with and without them.

All variants take turns in one process group, in a new order each round; ratios are within a round.

\b
Examples:
  python -m benchmarks.checks
      an MLP, a GPT and a thousand tiny tensors, on two ranks, about two minutes
  python -m benchmarks.checks --model gpt --seconds 120 --json checks.json
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(MODELS)}; repeatable. [default: {', '.join(DEFAULT_MODELS)}]"),
    ] = None,
    every: Annotated[int, typer.Option(help="Steps between two checks, to compute the cost per step.")] = 100,
    world_size: Annotated[int, typer.Option(help="Ranks on this machine.")] = 2,
    seconds: Annotated[float, typer.Option(help="Seconds of timed rounds for each model.")] = 40.0,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and the order of the steps.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    for name in model or ():
        if name not in MODELS:
            raise ArgumentError(f"There is no model '{name}'; choose from {', '.join(MODELS)}.")
    if every < 1:
        raise ArgumentError(f"--every must be at least 1, not {every}.")
    check_numbers(seconds, world_size)
    check_output(json_path, "--json", folder=False)
    settings = Settings(
        models=tuple(dict.fromkeys(model or DEFAULT_MODELS)),
        every=every,
        world_size=world_size,
        seconds=seconds,
        seed=seed,
    )
    console = make_console()
    write_document(run(settings, context.obj["command"], console), json_path, None, console)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.checks", arguments)
