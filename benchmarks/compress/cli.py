"""The command line of `python -m benchmarks.compress`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.compress.measure import FORMATS, make_calls, measure
from benchmarks.compress.report import bytes_text, render
from benchmarks.compress.results import size_result
from torchddp import _C
from torchddp.bench.report import write_document
from torchddp.harness.command import check_output, make_console, progress_bar, run_app
from torchddp.harness.machine import new_document
from torchddp.harness.variants import ArgumentError

HELP = """Compare the speed of the compression kernels with a memcpy of the same fp32 bytes, on one core.

The copy and all kernels take turns, in a new order each round. The report shows medians; ratios are within a round.

\b
Examples:
  python -m benchmarks.compress
      all formats at 64 KiB, 1 MiB and 64 MiB, under a minute
  python -m benchmarks.compress --format int8 --kib 65536 --rounds 50
  python -m benchmarks.compress --output benchmarks/results/compress.json
"""
DEFAULT_KIB = (64, 1024, 65536)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def run(
    formats: Sequence[str], kib: Sequence[int], share: float, rounds: int, seed: int, command: str, console: Console
) -> dict[str, Any]:
    """Measure, print the report, return the document."""
    settings = {
        "formats": list(formats),
        "kib": list(kib),
        "top_k_share": share,
        "rounds": rounds,
        "seed": seed,
        "cpu_capability": _C.cpu_capability(),
    }
    document = new_document(command, settings)
    with progress_bar(console) as progress:
        for size in kib:
            nbytes = size * 1024
            task = progress.add_task(bytes_text(nbytes), total=rounds + 1)
            calls = make_calls(nbytes, formats, share, seed)
            seconds = measure(calls, nbytes, rounds, seed, partial(progress.advance, task))
            document["results"].append(size_result(nbytes, list(calls), seconds))
    console.print(render(document))
    return document


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    format_names: Annotated[
        list[str] | None,
        typer.Option("--format", help=f"One of {', '.join(FORMATS)}; repeatable. [default: all]"),
    ] = None,
    kib: Annotated[
        list[int] | None,
        typer.Option(help=f"Size of the fp32 side, KiB; repeatable. [default: {', '.join(map(str, DEFAULT_KIB))}]"),
    ] = None,
    top_k: Annotated[float, typer.Option(help="Share of the elements that top-k selects.")] = 0.01,
    rounds: Annotated[int, typer.Option(help="Rounds of each size.")] = 15,
    seed: Annotated[int, typer.Option(help="Seed of the data and of the order in a round.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write everything to this JSON file.")] = None,
) -> None:
    for name in format_names or ():
        if name not in FORMATS:
            raise ArgumentError(f"There is no format '{name}'; choose from {', '.join(FORMATS)}.")
    sizes = kib or DEFAULT_KIB
    if min(sizes) < 1 or max(sizes) > 1 << 22:
        raise ArgumentError(f"--kib must be 1 to {1 << 22}, not {min(sizes) if min(sizes) < 1 else max(sizes)}.")
    if not 0 < top_k <= 1:
        raise ArgumentError(f"--top-k must be a share above 0 and at most 1, not {top_k:g}.")
    if rounds < 1:
        raise ArgumentError(f"--rounds must be at least 1, not {rounds}.")
    check_output(output, "--output", folder=False)
    torch.set_num_threads(1)
    formats = tuple(dict.fromkeys(format_names or FORMATS))
    console = make_console()
    document = run(formats, tuple(dict.fromkeys(sizes)), top_k, rounds, seed, context.obj["command"], console)
    write_document(document, output, None, console)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.compress", arguments)
