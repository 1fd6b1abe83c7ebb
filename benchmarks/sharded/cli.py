"""The command line of `python -m benchmarks.sharded`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.sharded.field import FIELD, REFERENCE, choose_variants
from benchmarks.sharded.plot import save_memory, save_speed
from benchmarks.sharded.report import field_table
from benchmarks.sharded.results import MEMORY_CASE, SPEED_CASE
from benchmarks.sharded.run import Settings, run
from torchddp.bench.report import write_document
from torchddp.harness.command import MAX_WORLD_SIZE, MODEL_NAMES, check_numbers, check_output, make_console, run_app
from torchddp.harness.variants import ArgumentError

DEFAULT_MODELS, SPEED_RANKS, MEMORY_RANKS = "mlp,gpt", "2", "2,4"

HELP = """Measure the costs and savings of sharded optimizers and gradients in torchddp, torch, fairscale and deepspeed.

Whole training steps with AdamW. All variants take turns in one process group after a check that they train alike; with
--memory each runs alone. Packages that are not installed are skipped; `make peers` creates an environment with them.

\b
Examples:
  python -m benchmarks.sharded
      two models, every variant, about two minutes
  python -m benchmarks.sharded --models mlp --variants torch-zero,torchddp-auto --seconds 10
      one pair
  python -m benchmarks.sharded --memory --ranks 2
      memory per rank
  python -m benchmarks.sharded --output benchmarks/results
      keep the numbers, and a plot
  python -m benchmarks.sharded --list
      the variants, and which can run here
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def split_names(text: str) -> tuple[str, ...]:
    """'a, b,a' -> ('a', 'b')."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def parse_models(text: str) -> tuple[str, ...]:
    """Names of built-in models; ArgumentError for unknown names or an empty list."""
    models = split_names(text)
    for name in models:
        if name not in MODEL_NAMES:
            raise ArgumentError(f"--models: there is no '{name}'; choose from {', '.join(MODEL_NAMES)}.")
    if not models:
        raise ArgumentError(f"--models must be names separated by commas, like {DEFAULT_MODELS}, not '{text}'.")
    return models


def parse_ranks(text: str) -> tuple[int, ...]:
    """'2,4' -> (2, 4); one rank has nothing to shard."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ArgumentError(f"--ranks must be numbers separated by commas, like 2,4, not '{text}'.") from None
    if not all(2 <= size <= MAX_WORLD_SIZE for size in sizes):
        raise ArgumentError(f"--ranks must be 2 to {MAX_WORLD_SIZE} ranks, not '{text}'.")
    return sizes


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODEL_NAMES)}.")] = DEFAULT_MODELS,
    variants: Annotated[
        str, typer.Option(help=f"Some of --list; {REFERENCE} always runs. [default: all {len(FIELD)}]")
    ] = "",
    ranks: Annotated[
        str | None, typer.Option(help=f"World sizes. [default: {SPEED_RANKS}; {MEMORY_RANKS} with --memory]")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of timed rounds for each model.")] = 45.0,
    memory: Annotated[bool, typer.Option("--memory", help="Measure memory instead of time.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and the order of the steps.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "--out", help="Write <date>-<case>-<machine>.json and a .png plot into this folder."),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show the variants and stop.")] = False,
) -> None:
    console = make_console()
    if show_list:
        console.print(field_table())
        return
    check_numbers(seconds, None)
    check_output(json_path, "--json", folder=False)
    check_output(output, "--output", folder=True)
    chosen = choose_variants(split_names(variants))
    settings = Settings(
        models=parse_models(models),
        variants=tuple(variant.name for variant in chosen),
        world_sizes=parse_ranks(ranks if ranks is not None else MEMORY_RANKS if memory else SPEED_RANKS),
        seconds=seconds,
        memory=memory,
        seed=seed,
    )
    document = run(settings, context.obj["command"], console)
    write_document(document, json_path, output, console, {SPEED_CASE: save_speed, MEMORY_CASE: save_memory})


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.sharded", arguments)
