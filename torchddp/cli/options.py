"""Options of the commands that work without typer, too: typer's, or what argparse needs of them."""

from typing import Annotated, Any

try:
    from typer import Option as Option
except ImportError:

    def Option(flag: str, *, help: str, **_: Any) -> Any:  # type: ignore[misc]
        return flag, help


AsJson = Annotated[bool, Option("--json", help="Print one JSON object.")]
