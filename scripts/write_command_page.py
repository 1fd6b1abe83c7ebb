"""Writes docs/command.md, which has the help of every command: `python -m scripts.write_command_page`."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

PAGE = Path(__file__).parents[1] / "docs" / "command.md"
WIDTH = 88

_INTRO = """\
# The torchddp command

All but `torchddp doctor` needs typer and rich: `pip install typer rich`, and matplotlib for plots. `python -m torchddp`
runs the same command with a given Python. Below is what `--help` prints (`python -m scripts.write_command_page` updates
this page).

| To | Command | Guide |
|---|---|---|
| check the installation | `torchddp doctor` | [Install](install.md#torchddp-doctor) |
| see where the time of a step goes | `torchddp trace` | [Find out where time goes](profiling.md) |
| find the best bucket size | `torchddp tune` | [Tune the buckets](tune_buckets.md) |
| predict other networks and more ranks | `torchddp simulate` | [Predict other networks](simulate.md) |
| compare classes | `torchddp bench` | [Results](performance.md) |
"""
_SECTION = """
## {name}

<!-- not run: help, compared with the command's by tests/unit/test_docs_reference.py -->
```text
{help}
```
"""


def help_of(*command: str) -> str:
    from torchddp.cli.app import app

    done = CliRunner().invoke(app, [*command, "--help"], prog_name="torchddp", terminal_width=WIDTH)
    if done.exit_code != 0:
        raise RuntimeError(f"torchddp {' '.join(command)} --help: {done.output}")
    return "\n".join(line.rstrip() for line in done.output.strip().splitlines())


def page() -> str:
    from torchddp.cli.app import app

    names = [command.name for command in app.registered_commands if command.name]
    sections = [("torchddp", help_of()), *((f"torchddp {name}", help_of(name)) for name in names)]
    return _INTRO + "".join(_SECTION.format(name=name, help=text) for name, text in sections)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    typer.echo(PAGE)


if __name__ == "__main__":
    typer.run(main)
