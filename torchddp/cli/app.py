"""The `torchddp` command: its subcommands."""

from __future__ import annotations

from collections.abc import Container
from importlib import import_module
from typing import Annotated

import typer

from torchddp._command import HELP_OPTIONS
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


# By name: module, function, and a short help that fits a line of 60 columns.
COMMANDS = {
    "doctor": ("torchddp.cli.doctor", "run", "Check that the installation works."),
    "build": ("torchddp.cli.build", "run", "Compile the extension for another torch."),
    "trace": ("torchddp.cli.trace", "trace", "Show where the time of a step goes."),
    "tune": ("torchddp.cli.tune", "tune", "Find the best bucket size for a model."),
    "simulate": ("torchddp.cli.simulate", "simulate", "Predict other networks and more ranks."),
    "bench": ("torchddp.bench.cli", "benchmark", "Time DDP classes against each other."),
}


def make_app(wanted: Container[str] = COMMANDS) -> typer.Typer:
    """The command with its subcommands; one that isn't wanted has only its short help, and is not loaded."""
    app = typer.Typer(
        rich_markup_mode=None, pretty_exceptions_enable=False, context_settings={"help_option_names": [*HELP_OPTIONS]}
    )
    app.callback(invoke_without_command=True, help=HELP)(torchddp)
    for name, (place, function, short) in COMMANDS.items():
        if name not in wanted:
            app.command(name, short_help=short)(lambda: None)
            continue
        module = import_module(place)
        app.command(name, help=module.HELP, short_help=short)(getattr(module, function))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from torchddp.cli.doctor import installed_version

        typer.echo(f"torchddp {installed_version() or '(version unknown: its metadata is not installed)'}")
        raise typer.Exit


def torchddp(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    set_rank_variables()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
