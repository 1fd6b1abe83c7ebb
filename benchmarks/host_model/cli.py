"""The command line of `python -m benchmarks.host_model`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.host_model.plot import save_model
from benchmarks.host_model.report import render
from benchmarks.host_model.results import compare, model_rows
from torchddp.bench.report import write_document
from torchddp.harness.command import make_console, output_option, run_app
from torchddp.harness.machine import new_document
from torchddp.harness.variants import ArgumentError

HELP = """Compute what an all-reduce moves among a host's ranks: cache lines and bytes, in total and across NUMA nodes.

Uses formulas for two schemes: every rank reads every other rank's data, or ranks work in groups and nodes. Nothing is
measured.

\b
Examples:
  python -m benchmarks.host_model
      64 B, 1 KiB, 1 MiB and 64 MiB, 2 to 128 ranks, on one and two nodes
  python -m benchmarks.host_model --ranks 96 --nodes 4 --bytes 1024
  TORCHDDP_COUNTS_FILE=counts.jsonl build/cpp-tests/torchddp_cpp_tests shm_a_
  python -m benchmarks.host_model --counts counts.jsonl
      compared with counts from the C++ tests
  python -m benchmarks.host_model --plot host_model.png
"""
DEFAULT_RANKS, DEFAULT_NODES = (2, 4, 8, 16, 32, 64, 128), (1, 2)
DEFAULT_BYTES = (64, 1024, 1 << 20, 64 << 20)
MAX_RANKS = 256

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def read_counts(path: Path) -> list[dict[str, Any]]:
    """The rows that the C++ tests have written, one per line."""
    try:
        return compare([json.loads(line) for line in path.read_text().splitlines()])
    except (OSError, ValueError, KeyError, TypeError) as error:
        wanted = "JSON objects with ranks, nodes, message_bytes, lines, far_lines, bytes and far_bytes, one per line"
        raise ArgumentError(f"--counts must have {wanted}; in '{path}': {type(error).__name__} {error}.") from None


@app.command(help=HELP)
def model(
    context: typer.Context,
    ranks: Annotated[list[int] | None, typer.Option(help="Ranks on the host; repeatable.")] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="NUMA nodes; repeatable.")] = None,
    sizes: Annotated[list[int] | None, typer.Option("--bytes", help="Size of the all-reduce; repeatable.")] = None,
    counts: Annotated[Path | None, typer.Option(help="Compare with the counts in this file.")] = None,
    json_path: Annotated[Path | None, output_option("Write everything to this file.", "--json")] = None,
    plot: Annotated[Path | None, output_option("Plot the moved data against the number of ranks.", "--plot")] = None,
) -> None:
    for option, values, least, most in (
        ("--ranks", ranks, 2, MAX_RANKS),
        ("--nodes", nodes, 1, MAX_RANKS),
        ("--bytes", sizes, 1, 1 << 40),
    ):
        for value in values or ():
            if not least <= value <= most:
                raise ArgumentError(f"{option} must be {least} to {most}, not {value}.")
    settings = {
        "ranks": sorted(set(ranks or DEFAULT_RANKS)),
        "nodes": sorted(set(nodes or DEFAULT_NODES)),
        "bytes": sorted(set(sizes or DEFAULT_BYTES)),
    }
    document = new_document(context.obj["command"], settings)
    document["results"] = model_rows(settings["ranks"], settings["nodes"], settings["bytes"])
    document["counts"] = read_counts(counts) if counts is not None else []
    console = make_console()
    console.print(render(document))
    write_document(document, json_path, None, console)
    if plot is not None:
        save_model(document["results"], plot)
        console.print(f"wrote {plot}")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.host_model", arguments)
