"""What all our commands share: how they end, where they print, what they write."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from torchddp.harness.launch import LaunchError
from torchddp.harness.variants import ArgumentError

EXIT_FAILED, EXIT_BAD_ARGUMENT, EXIT_INTERRUPTED = 1, 2, 130


def check_output(path: Path | None, option: str, *, folder: bool) -> None:
    """Refuse before the run what could not be written after it."""
    if path is None:
        return
    if folder and path.exists() and not path.is_dir():
        raise ArgumentError(f"{option} wants a folder, and '{path}' is a file.")
    if not folder and path.is_dir():
        raise ArgumentError(f"{option} wants a file, and '{path}' is a folder.")
    if not folder and not path.parent.is_dir():
        raise ArgumentError(f"{option}: the folder '{path.parent}' does not exist.")
    if not folder and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentError(f"{option}: '{path}' can't be written.")


def write_document(
    document: dict[str, Any],
    json_path: Path | None,
    out: Path | None,
    console: Console,
    own_plots: Mapping[str, Any] | None = None,
) -> None:
    """Keep the numbers where --json and --out said."""
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        console.print(f"wrote {json_path}")
    if out is not None:
        from torchddp.bench.saving import save_results

        for path in save_results(document, out, own_plots):
            console.print(f"wrote {path}")


def make_console() -> Console:
    """A terminal's own width up to 100 columns; 100 into a file or a pipe."""
    console = Console()
    return Console(width=min(console.width, 100) if console.is_terminal else 100, emoji=False)


def _describe_error(error: Exception, program: str) -> tuple[str, int]:
    if isinstance(error, ArgumentError):
        return str(error), EXIT_BAD_ARGUMENT
    if isinstance(error, typer.TyperException):
        message = error.format_message().rstrip(".")
        # Of several commands, the one that was asked for.
        program = getattr(getattr(error, "ctx", None), "command_path", program)
        return f"{message}; see {program} --help.", error.exit_code
    return str(error), EXIT_FAILED


def run_app(program_app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run a command of ours; the exit code. Whatever stops it is one sentence on stderr."""
    command = shlex.join([*program.split(), *arguments])
    try:
        result = program_app(list(arguments), standalone_mode=False, prog_name=program, obj={"command": command})
    except (ArgumentError, LaunchError, typer.TyperException) as error:
        message, code = _describe_error(error, program)
        # ":x:" in what the user wrote is no emoji.
        Console(stderr=True, emoji=False).print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
        return code
    except (KeyboardInterrupt, typer.Abort):
        Console(stderr=True).print("interrupted")
        return EXIT_INTERRUPTED
    # In this mode typer returns the code of an early exit such as --help.
    return result if isinstance(result, int) else 0
