"""The `torchddp` command. It needs typer and rich, which `import torchddp` does not."""

import sys

WHAT_IS_MISSING = "torchddp: the command line needs typer and rich; install them with: pip install typer rich"


def main() -> None:
    """Entry point of `torchddp` and `python -m torchddp`."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        sys.exit(WHAT_IS_MISSING)
    from torchddp.cli.app import app
    from torchddp.harness.command import run_app

    sys.exit(run_app(app, "torchddp", sys.argv[1:]))
