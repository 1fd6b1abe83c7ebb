"""The `torchddp` command: its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from torchddp.bench import cli as bench
from torchddp.cli import doctor, simulate, trace, tune
from torchddp.harness.command import CONTEXT
from torchddp.harness.srun import set_rank_variables

HELP = """Measure, tune and check data-parallel training with torchddp.

\b
First steps:
  torchddp doctor                 does it work here?
  torchddp trace                  where does the time of a step go?
  torchddp tune --model train.py:make
                                  which bucket size suits my model?

\b
Each command has its own help: torchddp trace -h
"""

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=CONTEXT)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchddp {doctor.installed_version() or '(version unknown: its metadata is not installed)'}")
        raise typer.Exit


@app.callback(invoke_without_command=True, help=HELP)
def torchddp(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    set_rank_variables()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# The short help fits a line of 60 columns.
@app.command("doctor", help=doctor.HELP, short_help="Check that the installation works.")
def _doctor(as_json: Annotated[bool, typer.Option("--json", help=doctor.JSON_HELP)] = False) -> None:
    raise typer.Exit(doctor.run(as_json))


app.command("trace", help=trace.HELP, short_help="Show where the time of a step goes.")(trace.trace)
app.command("tune", help=tune.HELP, short_help="Find the best bucket size for a model.")(tune.tune)
app.command("simulate", help=simulate.HELP, short_help="Predict other networks and more ranks.")(simulate.simulate)
app.command("bench", help=bench.HELP, short_help="Time DDP classes against each other.")(bench.benchmark)
