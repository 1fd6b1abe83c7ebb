"""Options of the commands that work without typer, too: typer's, or what argparse needs of them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any


def _plain(flag: str, *, help: str, **_: object) -> tuple[str, str]:
    return flag, help


Option: Callable[..., Any] = _plain
with suppress(ImportError):
    import typer

    Option = typer.Option

AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
