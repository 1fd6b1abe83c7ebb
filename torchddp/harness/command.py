"""Shared by all commands: option checks, exit codes and output."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from torchddp.harness.launch import (
    EXIT_BAD_ARGUMENT,
    EXIT_INTERRUPTED,
    LaunchError,
    ModelSettings,
    RankJob,
    interrupted_once,
    run_ranks,
    started_by_torchrun,
)
from torchddp.harness.machine import available_cores, new_document, write_json
from torchddp.harness.model_names import MODEL_HELP, MODEL_NAMES, check_model_name
from torchddp.harness.tables import TABLE_WIDTH, ranks_text
from torchddp.harness.variants import ArgumentError

MAX_WORLD_SIZE, MAX_SECONDS, LARGEST_CAP_MB = 64, 3600, 2**20

# Unsure: the measurements don't allow an answer.
EXIT_FAILED, EXIT_UNSURE = 1, 3


def parse_caps(text: str) -> tuple[float, ...]:
    """'1,5,25' -> (1.0, 5.0, 25.0)."""
    return tuple(dict.fromkeys(parse_cap(part, "each of --caps, like 1,5,25,") for part in text.split(",")))


def parse_cap(text: str, option: str, others: str = "") -> float:
    """MiB; ArgumentError unless the text is a positive number. `others`: what else is allowed, for the message."""
    with contextlib.suppress(ValueError):
        if 0 < (cap := float(text)) <= LARGEST_CAP_MB:
            return cap
        if cap > LARGEST_CAP_MB:
            others = f", at most {LARGEST_CAP_MB}"
    raise ArgumentError(f"{option} must be a positive number of MiB{others}, not '{text}'.")


def check_plots(option: str, path: Path | None) -> None:
    """ArgumentError, before anything is measured, if a picture is asked for that can't be drawn."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(f"{option} needs matplotlib: pip install matplotlib.")


def check_numbers(seconds: float | None, world_size: int | None) -> None:
    if seconds is not None and not 0 < seconds <= MAX_SECONDS:
        raise ArgumentError(f"--seconds must be above 0 and at most {MAX_SECONDS}, not {seconds:g}.")
    if world_size is not None and not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ArgumentError(f"--world-size must be 1 to {MAX_WORLD_SIZE}, not {world_size}.")


def model_names() -> list[str]:
    return list(MODEL_NAMES)


def check_output(path: Path | None, option: str, *, folder: bool) -> None:
    """ArgumentError before the run if a path couldn't be written after it: a file, or a folder with its parents."""
    if path is None:
        return
    try:
        path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise ArgumentError(f"{option}: cannot write to '{path}': {error.strerror}.") from error
    if folder and path.exists() and not path.is_dir():
        raise ArgumentError(f"{option} must be a folder, but '{path}' is a file.")
    if not folder and path.is_dir():
        raise ArgumentError(f"{option} must be a file, but '{path}' is a folder.")
    if not folder and not path.parent.is_dir():
        raise ArgumentError(f"{option}: the folder '{path.parent}' does not exist.")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not (there.is_dir() or there == path) or not os.access(there, os.W_OK):
        raise ArgumentError(f"{option}: cannot write to '{path}'.")


def named_once(context: typer.Context, path: Path | None) -> Path | None:
    """ArgumentError for a file that another argument also names: one would overwrite the other."""
    others = {other.resolve() for other in context.params.values() if isinstance(other, Path)}
    if path is not None and path.resolve() in others and (path.is_file() or not path.exists()):  # no /dev/null
        raise ArgumentError(f"Two arguments name the file '{path}'.")
    return path


def output_option(help_text: str, *names: str, folder: bool = False) -> Any:
    def checked(context: typer.Context, param: typer.CallbackParam, path: Path | None) -> Path | None:
        check_output(path, param.opts[0], folder=folder)
        return named_once(context, path)

    return typer.Option(*names, metavar="FOLDER" if folder else "FILE", help=help_text, callback=checked)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever reads the output wants no more of it, as `head`; files are yet to be written."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


def make_console() -> Console:
    """As wide as the terminal, 80 to 100 columns; 100 in a file or pipe, unless COLUMNS is set. No markup.

    In less than 80, rich would leave out columns of tables.
    """
    console = Console()
    width = min(max(console.width, TABLE_WIDTH), 100) if console.is_terminal or "COLUMNS" in os.environ else 100
    return _Console(width=width, markup=False, emoji=False, highlight=False)


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    is_pipe = not console.is_terminal  # where it would print an empty line
    return Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=is_pipe)


class Display:
    """The progress bar. Redrawn rarely: the ranks need the cores."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def start(self, case: str) -> None:
        self._case = case
        self._progress.reset(self._task, total=None, description=f"{case}: starting ranks")

    def update(self, what: str, done: float, total: float) -> None:
        self._progress.update(self._task, description=f"{self._case} · {what}", completed=done, total=total)

    def show(self, text: RenderableType) -> None:
        self._progress.console.print(text, soft_wrap=True)


FACTORY_HELP = """\b
--model takes a built-in model, or your own function that returns
(module, batch) or (module, batch, loss): train.py:make or package.train:make."""
FindUnusedParameters = Annotated[
    bool, typer.Option("--find-unused-parameters", help="For models that leave some parameters unused in a step.")
]
JsonFile = Annotated[Path | None, output_option("Write the report as JSON to this file.", "--json")]


def report_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def run_app(program_app: typer.Typer, program: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. An error prints one sentence to stderr."""
    command = shlex.join([*program.split(), *arguments])
    try:
        with interrupted_once():
            result = program_app(list(arguments), standalone_mode=False, prog_name=program, obj={"command": command})
            print(end="", flush=True)  # an error of the last writes belongs here, too
    except (ArgumentError, LaunchError, typer.TyperException) as error:
        message, code = str(error), EXIT_BAD_ARGUMENT if isinstance(error, ArgumentError) else EXIT_FAILED
        if isinstance(error, typer.TyperException):
            # The subcommand, if there is one. A missing value of an option comes without context.
            given = " ".join([program, *(name for name in arguments[:1] if not name.startswith("-"))])
            program = getattr(getattr(error, "ctx", None), "command_path", given)
            text, code = error.format_message(), error.exit_code
            message = f"{text if text.endswith(('.', '?')) else f'{text}.'} See {program} --help."
        report_error(message)
        return code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it ends
        report_error(f"cannot write the output: {error.strerror}")
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        result = EXIT_INTERRUPTED
    if result == EXIT_INTERRUPTED and os.environ.get("RANK", "0") == "0":  # each of torchrun's ranks gets here
        print("interrupted", file=sys.stderr)
    # In this mode, typer returns the exit code of an early exit, such as --help, or of an interrupt.
    return result if isinstance(result, int) else 0


def check_loads() -> None:
    """LaunchError if the package does not load."""
    from torchddp import import_error

    if import_error is not None:
        raise LaunchError(f"torchddp does not load here, see `torchddp doctor`: {import_error}")


def _check_model(model: str) -> str:
    check_model_name(model)
    if ":" in model:
        check_loads()
        from torchddp.harness.models import find_factory

        find_factory(model)
    return model


def _check_transport(context: typer.Context, transport: str) -> str:
    if context.resilient_parsing:  # to complete the line
        return transport
    check_loads()
    from torchddp.transport.select import check_choice

    try:
        check_choice(transport)
    except ValueError as error:
        raise ArgumentError(f"--transport: {error}.") from error
    return transport


# With a Literal, typer would reject other names in several lines; _check_transport does it in one.
TRANSPORTS = ("auto", "c10d", "shm", "nccl")
ModelName = Annotated[
    str, typer.Option(metavar="MODEL", callback=_check_model, autocompletion=model_names, help=f"{MODEL_HELP}.")
]
TransportName = Annotated[
    str,
    typer.Option(
        metavar="TRANSPORT",
        callback=_check_transport,
        autocompletion=lambda: list(TRANSPORTS),
        help="What carries the gradients: auto, c10d, shm or nccl.",
    ),
]
WorldSize = Annotated[int | None, typer.Option(metavar="N", help="Number of ranks. [default: 2, or torchrun's]")]


def check_world_size(asked: int | None, purpose: str) -> int:
    """The number of ranks. ArgumentError for one, where there is nothing `purpose` ("to trace"), or not torchrun's."""
    check_numbers(None, asked)
    started = int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else None
    if started is not None and asked not in (None, started):
        raise ArgumentError(f"--world-size {asked}: torchrun started {ranks_text(started)}; leave the option out.")
    world_size = started or asked or 2
    if world_size == 1:
        raise ArgumentError(f"With one rank there is nothing to synchronize, so nothing {purpose}; use two or more.")
    return world_size


def run_command(
    context: typer.Context,
    function: Callable[..., Any],
    settings: ModelSettings,
    console: Console,
    describe: Callable[[float, float], str],
    json_path: Path | None,
) -> Any:
    """Run `function(report, settings)` on every rank with a progress bar. Rank 0's result; None on other ranks.

    If it fails, the file of --json says why.
    """
    import torch

    case = str(context.info_name)

    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", settings.world_size)))
    # NCCL if each rank of this host can have its own GPU; otherwise gloo, on the CPU.
    backend = "nccl" if ranks_here <= torch.cuda.device_count() else "gloo"
    threads = max(1, available_cores() // ranks_here)
    job = RankJob(case, function, (settings,), settings.world_size, backend, threads=threads)
    with progress_bar(console) as progress:
        display = Display(progress)
        display.start(case)
        try:
            return run_ranks(job, lambda _, done, total: display.update(describe(done, total), done, total))
        except (ArgumentError, LaunchError) as error:
            if not console.quiet:
                write_failure(json_path, context, settings, str(error))
            raise


def document_of(context: typer.Context, settings: Any, **found: object) -> dict[str, Any]:
    """The document of the command, with what it has found; `settings` is a dataclass."""
    return {**new_document(str(context.info_name), context.obj["command"], asdict(settings)), **found}


def write_failure(path: Path | None, context: typer.Context, settings: Any, why: str) -> None:
    """The file of --json for a run without results."""
    if path is not None:
        with contextlib.suppress(OSError):  # the failure itself matters more
            write_json(path, document_of(context, settings, failures=[why]))


def rank_console() -> Console:
    speaks = not started_by_torchrun() or os.environ["RANK"] == "0"
    return make_console() if speaks else Console(quiet=True)


Output = tuple[Path | None, Callable[[Path], object]]


def write_outputs(console: Console, document: dict[str, Any], json_path: Path | None, *others: Output) -> None:
    """Write each requested file, and print its path. ArgumentError if one can't be written, as on a full disk."""
    first: Output = json_path, partial(write_json, document=document)
    for path, write in (first, *others):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise ArgumentError(f"cannot write to '{path}': {error.strerror}") from error
            console.print(f"wrote {path}", soft_wrap=True)
