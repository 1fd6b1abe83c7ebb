"""`torchddp bench`: the benchmark's own command, as a part of ours."""

from __future__ import annotations

import typer

from torchddp.bench.cli import HELP, benchmark


def add_bench(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    app.command("bench", help=HELP)(benchmark)
