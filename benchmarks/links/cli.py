"""The command line of `python -m benchmarks.links`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.links.field import CASE, SWEPT_CAPS_MB
from benchmarks.links.plot import save_links
from benchmarks.links.run import Settings, run
from benchmarks.two_hosts.network import parse_rate
from torchddp.bench.report import write_document
from torchddp.harness.command import check_numbers, check_output, make_console, parse_caps, run_app
from torchddp.harness.variants import ArgumentError

HELP = """Compare planned buckets with every bucket size over links of several rates, and predictions with measurements.

Two ranks: on one host, and in two network namespaces connected by a rate-limited veth pair. All variants take turns in
one process group. Links need root and the programs ip and tc; nothing is left behind.

\b
Examples:
  python -m benchmarks.links
      a conv net and an MLP on one host and over 10, 1 and 0.1 Gbit/s, about twenty minutes
  python -m benchmarks.links --rate 1gbit --model conv --seconds 20
      a single link
  python -m benchmarks.links --out benchmarks/results
      keep the numbers, and a plot
"""
DEFAULT_RATES = ("10gbit", "1gbit", "100mbit")
DEFAULT_MODELS = ("conv", "mlp")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(CASE.models)}; repeatable. [default: {' and '.join(DEFAULT_MODELS)}]"),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(help=f"Bandwidth of a link, each way; repeatable. [default: {', '.join(DEFAULT_RATES)}]"),
    ] = None,
    one_host: Annotated[bool, typer.Option(help="Also measure two ranks on one host.")] = True,
    caps: Annotated[str | None, typer.Option(help="The bucket sizes of the sweep, MiB.")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds of timed rounds for each model at each place.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and the order of the steps.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write <date>-links-<machine>.json and a .png plot into this folder.")
    ] = None,
) -> None:
    for name in model or ():
        if name not in CASE.models:
            raise ArgumentError(f"There is no model '{name}'; choose from {', '.join(CASE.models)}.")
    check_numbers(seconds, None)
    check_output(json_path, "--json", folder=False)
    check_output(out, "--out", folder=True)
    settings = Settings(
        models=tuple(dict.fromkeys(model or DEFAULT_MODELS)),
        rates=tuple(dict.fromkeys(map(parse_rate, rate or DEFAULT_RATES))),
        one_host=one_host,
        caps_mb=SWEPT_CAPS_MB if caps is None else parse_caps(caps),
        seconds=seconds,
        seed=seed,
    )
    console = make_console()
    write_document(run(settings, context.obj["command"], console), json_path, out, console, {CASE.name: save_links})


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return run_app(app, "python -m benchmarks.links", arguments)
