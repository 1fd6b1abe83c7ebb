"""Shared by the commands: options that are checked before any rank starts, running the ranks, writing files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torchddp.harness.command import (
    MODEL_NAMES,
    Display,
    ModelSettings,
    check_model_name,
    check_numbers,
    make_console,
    progress_bar,
)
from torchddp.harness.launch import LaunchError, RankJob, run_ranks, started_by_torchrun
from torchddp.harness.tables import ranks_text
from torchddp.harness.variants import ArgumentError


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


def _check_transport(transport: str) -> str:
    check_loads()
    from torchddp.transport.select import check_choice

    try:
        check_choice(transport)
    except ValueError as error:
        raise ArgumentError(f"--transport: {error}.") from error
    return transport


# With a Literal, typer would reject other names in several lines; _check_transport does it in one.
TRANSPORTS = ("auto", "c10d", "shm", "nccl")
Model = Annotated[
    str,
    typer.Option(
        callback=_check_model,
        autocompletion=lambda: list(MODEL_NAMES),
        help=f"{', '.join(MODEL_NAMES)}, or your own: package.module:factory or file.py:factory.",
    ),
]
Transport = Annotated[
    str,
    typer.Option(
        callback=_check_transport,
        autocompletion=lambda: list(TRANSPORTS),
        help="What carries the gradients: auto, c10d, shm or nccl.",
    ),
]
WorldSize = Annotated[int | None, typer.Option(help="Number of ranks. [default: 2, or torchrun's]")]


def check_world_size(asked: int | None, purpose: str) -> int:
    """The number of ranks; an `ArgumentError` if it is one, which leaves nothing `purpose` ("to trace"), or not the
    number that torchrun started.
    """
    check_numbers(None, asked)
    started = int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else None
    if started is not None and asked not in (None, started):
        raise ArgumentError(f"--world-size {asked}: torchrun started {ranks_text(started)}; leave the option out.")
    world_size = started or asked or 2
    if world_size == 1:
        raise ArgumentError(
            f"With one rank there is nothing to synchronize, and so nothing {purpose}; use two or more."
        )
    return world_size


def run_command(
    case: str,
    function: Callable[..., Any],
    settings: ModelSettings,
    console: Console,
    describe: Callable[[float, float], str],
) -> Any:
    """Run `function(report, settings)` on every rank, with a progress bar (`describe(done, total)` is its text), and
    return rank 0's result; None on torchrun's other ranks.
    """
    from torchddp.harness.subject import choose_backend, threads_each

    job = RankJob(
        case=case,
        function=function,
        arguments=(settings,),
        world_size=settings.world_size,
        backend=choose_backend(settings.world_size),
        threads=threads_each(settings.world_size),
    )
    with progress_bar(console) as progress:
        display = Display(progress)
        display.start(case)
        return run_ranks(job, lambda _, done, total: display.update(describe(done, total), done, total))


def rank_console() -> Console:
    """A console that is silent on torchrun's ranks other than 0."""
    speaks = not started_by_torchrun() or os.environ["RANK"] == "0"
    return make_console() if speaks else Console(quiet=True)


def write_outputs(console: Console, *outputs: tuple[Path | None, Callable[[Path], object]]) -> None:
    """Write each requested file, and print its path. ArgumentError if one can't be written, as on a full disk."""
    for path, write in outputs:
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise ArgumentError(f"cannot write to '{path}': {error.strerror}") from error
            console.print(f"wrote {path}", soft_wrap=True)
