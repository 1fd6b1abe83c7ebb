"""The `torchddp` command. All but `torchddp doctor` needs typer and rich, which `import torchddp` does not."""

import os
import sys

from torchddp._command import HELP_OPTIONS, only_explains

WHAT_IS_MISSING = "torchddp: all commands but `torchddp doctor` need typer and rich: pip install typer rich"


def main() -> None:
    """Entry point of `torchddp` and `python -m torchddp`."""
    arguments = sys.argv[1:]
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        if arguments[:1] != ["doctor"]:
            sys.exit(WHAT_IS_MISSING)
        from torchddp.cli import doctor

        sys.exit(doctor.main(arguments[1:]))
    from torchddp.cli.app import make_app

    completed = os.environ.get("COMP_WORDS", "") + os.environ.get("_TYPER_COMPLETE_ARGS", "")
    app = make_app([*arguments, *completed.split()])
    if only_explains() and {*arguments} <= {*HELP_OPTIONS, "--version"}:
        app(arguments, prog_name="torchddp")  # which exits; it needs nothing that shows results
    from torchddp.harness.command import run_app

    sys.exit(run_app(app, "torchddp", arguments))
