"""What `torchddp` can do: its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from torchddp.bench import cli as bench
from torchddp.cli import doctor, simulate, trace, tune
from torchddp.harness.srun import tell_ranks

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchddp {doctor.installed_version() or 'of unknown version (its metadata is not installed)'}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def torchddp(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tools around torchddp.DistributedDataParallel."""
    tell_ranks()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("doctor", help=doctor.HELP)(doctor.doctor)
app.command("bench", help=bench.HELP)(bench.benchmark)
app.command("simulate", help=simulate.HELP)(simulate.simulate)
app.command("trace", help=trace.HELP)(trace.trace)
app.command("tune", help=tune.HELP)(tune.tune)
