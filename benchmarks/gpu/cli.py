"""The command line of `python -m benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.cases import MODELS_CASE
from benchmarks.gpu.run import MODELS_PART, ROW_PARTS, Document, Settings, run
from torchddp.bench.report import results_of, write_document
from torchddp.harness.command import check_numbers, check_output, make_console, parse_caps, run_app
from torchddp.harness.launch import LaunchError
from torchddp.harness.machine import write_json
from torchddp.harness.variants import ArgumentError

DEVICES, BACKENDS = ("cuda", "cpu"), ("nccl", "gloo")
DEFAULT_SECONDS, QUICK_SECONDS = 240.0, 4.0
ROWS = "rows"
DEFAULT_CAPS, QUICK_CAPS = "1,25,100", "25"
SEQUENCE_LIMITS = (16, 8192)

HELP = """Compare the speed of torchddp's DistributedDataParallel with torch's on a GPU.

All variants take turns in one process group; each step starts on an idle device. Quote ratios from one run, with their
spread.

\b
Examples:
  python -m benchmarks.gpu
      everything, about four minutes, one rank over NCCL
  python -m benchmarks.gpu --part models --model gpt2 --seconds 60
      one table
  python -m benchmarks.gpu --part rows
      everything but the models: packing, scaling, host time, options, memory, leaving
  python -m benchmarks.gpu --world-size 2 --backend gloo
      two ranks sharing the GPU: kernel counts, not speed
  python -m benchmarks.gpu --json result.json --out benchmarks/results
      keep the numbers, and plots
  python -m benchmarks.gpu --device cpu --backend gloo --quick
      the whole program without a GPU, to check that it works
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def choose(what: str, asked: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """The requested names without duplicates, or all; raises `ArgumentError` for an unknown name."""
    for name in asked:
        if name not in allowed:
            raise ArgumentError(f"There is no {what} '{name}'; choose from {', '.join(allowed)}.")
    return tuple(dict.fromkeys(asked)) or tuple(allowed)


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join((MODELS_PART, *ROW_PARTS))}, rows (all but models); repeatable. [default: all]"
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"For the part models: one of {', '.join(MODELS_CASE.models)}; repeatable. [default: all]"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time budget of the whole run; every table gets some rounds. [default: 240; 4 with --quick]"),
    ] = None,
    world_size: Annotated[int, typer.Option(help="Number of ranks; more ranks than GPUs need gloo.")] = 1,
    backend: Annotated[str, typer.Option(help="nccl or gloo.")] = "nccl",
    device: Annotated[str, typer.Option(help="cuda or cpu (a dry run).")] = "cuda",
    caps: Annotated[
        str | None, typer.Option(help="bucket_cap_mb values of the tuned rows. [default: 1,25,100; 25 with --quick]")
    ] = None,
    sequence: Annotated[int, typer.Option(help="Tokens per sequence of gpt2.")] = 1024,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, few rounds. Do not quote the numbers.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and the order of the steps.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the models' <date>-gpu-<machine>.json and .png into this folder.")
    ] = None,
) -> None:
    check_numbers(seconds, world_size)
    choose("device", (device,), DEVICES)
    choose("backend", (backend,), BACKENDS)
    low, high = SEQUENCE_LIMITS
    if not low <= sequence <= high:
        raise ArgumentError(f"--sequence must be {low} to {high} tokens, not {sequence}.")
    check_output(json_path, "--json", folder=False)
    check_output(out, "--out", folder=True)
    parts = choose("part", part or (), (MODELS_PART, *ROW_PARTS, ROWS))
    settings = Settings(
        parts=tuple(
            name for name in (MODELS_PART, *ROW_PARTS) if name in parts or (ROWS in parts and name in ROW_PARTS)
        ),
        models=choose("model", model or (), MODELS_CASE.models),
        seconds=seconds if seconds is not None else (QUICK_SECONDS if quick else DEFAULT_SECONDS),
        world_size=world_size,
        backend=backend,
        device=device,
        caps_mb=parse_caps(caps if caps is not None else (QUICK_CAPS if quick else DEFAULT_CAPS)),
        sequence=sequence,
        quick=quick,
        seed=seed,
    )
    console = make_console()

    def keep(document: Document) -> None:
        if json_path is not None:
            write_json(json_path, document)

    document = run(settings, context.obj["command"], console, keep)
    models = {**document, "results": results_of(document, MODELS_CASE.name)}
    write_document(models, None, out, console)
    if document["failures"]:
        raise LaunchError(
            f"failed: {', '.join(failure['stage'] for failure in document['failures'])}; the reasons are above"
        )


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.gpu", arguments)
