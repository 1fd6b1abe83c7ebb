"""Writes the help of every command into docs/reference/command.md: `python -m scripts.write_command_page`."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "command.md"
WIDTH = 88
BEGIN, END = "<!-- help -->\n", "\n<!-- end of help -->"


def help_of(*command: str) -> str:
    from torchddp.cli.app import make_app

    done = CliRunner().invoke(make_app(), [*command, "--help"], prog_name="torchddp", terminal_width=WIDTH)
    if done.exit_code != 0:
        raise RuntimeError(f"torchddp {' '.join(command)} --help: {done.output}")
    return "\n".join(line.rstrip() for line in done.output.strip().splitlines())


def page() -> str:
    """The page with the help as the commands print it now."""
    from torchddp.cli.app import make_app

    names = [command.name for command in make_app().registered_commands if command.name]
    sections = [("torchddp", help_of()), *((f"torchddp {name}", help_of(name)) for name in names)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    helps = "".join(f"\n## {name}\n\n```text\n{text}\n```\n" for name, text in sections)
    return before + BEGIN + helps + END + rest.partition(END)[2]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    typer.echo(PAGE)


if __name__ == "__main__":
    typer.run(main)
