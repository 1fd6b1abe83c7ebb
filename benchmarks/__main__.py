"""`python -m benchmarks`: `torchddp bench` with developers' cases."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from benchmarks.cases import CASES
from torchddp._command import HELP_OPTIONS
from torchddp.bench import registry
from torchddp.bench.cases import BenchCase
from torchddp.bench.cli import HELP, benchmark
from torchddp.harness import command


def developers_help(cases: Sequence[BenchCase]) -> str:
    parts = [HELP.rstrip(), "", "\b", "Cases for developers:"]
    for case in cases:
        parts.append(f"  {case.name:11} {case.title}")
        parts += [f"    --set {name}=  {option.help}" for name, option in case.options.items()]
    return "\n".join(parts)


def main(arguments: Sequence[str], cases: Sequence[BenchCase] = ()) -> int:
    """Run `python -m benchmarks`, with these cases besides the users', and return its exit code."""
    registry.CASES.update({case.name: case for case in cases})
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": [*HELP_OPTIONS]}
    )
    app.command(help=developers_help(cases))(benchmark)
    return command.run_app(app, "python -m benchmarks", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES))
