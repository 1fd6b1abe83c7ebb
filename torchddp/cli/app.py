"""What `torchddp` can do: one function per command."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from torchddp.cli import diagnosis, doctor_report, simulate_command, trace_command, tune_command
from torchddp.cli.bench_command import add_bench

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchddp {diagnosis.installed_version() or 'of unknown version (its metadata is not installed)'}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def torchddp(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tools around torchddp.DistributedDataParallel."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what was built, what is running, which transports work here, and what does not fit together.

    \b
    Transports are tried: processes of this machine reduce a tensor. Takes some seconds.
    Exit code 0: everything fits. 1: the extension does not load, was built for another torch, Python or
    CUDA, or a TORCHDDP_* variable has a value that is not allowed. A transport that can't be had here
    is no error: the reason is printed.

    \b
    Examples:
      torchddp doctor
      python -m torchddp doctor          the same, of the Python that runs it
      torchddp doctor --json | python -m json.tool
      torchddp doctor || echo "this environment will not train"
    """
    found = diagnosis.diagnose()
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        doctor_report.show(found, Console(highlight=False, soft_wrap=True))
    raise typer.Exit(1 if found.problems else 0)


add_bench(app)
app.command(help=simulate_command.HELP)(simulate_command.simulate)
app.command(help=trace_command.HELP)(trace_command.trace)
app.command(help=tune_command.HELP)(tune_command.tune)
