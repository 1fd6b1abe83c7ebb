"""The command line of `python -m benchmarks.two_hosts`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.two_hosts.network import parse_rate
from benchmarks.two_hosts.results import AUTO, CASE
from benchmarks.two_hosts.run import Settings, run
from torchddp.bench.report import write_document
from torchddp.harness.command import check_numbers, check_output, make_console, parse_caps, run_app
from torchddp.harness.variants import TORCHDDP, ArgumentError

HELP = """Compare the speed of DistributedDataParallel classes on two emulated hosts joined by a slow link.

Two network namespaces on this machine with two ranks each, connected by a rate-limited veth pair. All variants take
turns in one process group. Needs root and the programs ip and tc; leaves nothing behind.

\b
Examples:
  python -m benchmarks.two_hosts
      an MLP and a conv net over 1 Gbit/s, about three minutes
  python -m benchmarks.two_hosts --model conv --seconds 10 --caps 5,25
      a quick run with one table
  python -m benchmarks.two_hosts --rate 10gbit
      a faster link
  python -m benchmarks.two_hosts --transport c10d
      our class over the process group
  python -m benchmarks.two_hosts --json result.json --out benchmarks/results
      keep the numbers, and a plot
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def check_models(models: Sequence[str]) -> tuple[str, ...]:
    """The models to run, without duplicates; raises `ArgumentError` for an unknown one."""
    for model in models:
        if model not in CASE.models:
            raise ArgumentError(f"There is no model '{model}'; choose from {', '.join(CASE.models)}.")
    return tuple(dict.fromkeys(models)) or CASE.quick_models


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(CASE.models)}; repeatable. [default: {' and '.join(CASE.quick_models)}]"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of timed rounds for each model.")] = 60.0,
    rate: Annotated[str, typer.Option(help="Bandwidth of the link, each way, like 500mbit or 2.5gbit.")] = "1gbit",
    transport: Annotated[str, typer.Option(help="The transport= argument of the class under test.")] = AUTO,
    caps: Annotated[str, typer.Option(help="bucket_cap_mb of torch's tuned rows, one row per value.")] = "1,5,25",
    ours: Annotated[str, typer.Option(help="The class under test, as a dotted path.")] = TORCHDDP,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and the order of the steps.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write <date>-two_hosts-<machine>.json and a .png plot into this folder.")
    ] = None,
) -> None:
    models = check_models(model or ())
    check_numbers(seconds, None)
    check_output(json_path, "--json", folder=False)
    check_output(out, "--out", folder=True)
    settings = Settings(
        models=models,
        seconds=seconds,
        rate=parse_rate(rate),
        transport=transport,
        caps_mb=parse_caps(caps),
        ours=ours,
        seed=seed,
    )
    console = make_console()
    write_document(run(settings, context.obj["command"], console), json_path, out, console)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.two_hosts", arguments)
