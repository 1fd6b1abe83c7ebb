"""The `torchddp` command. All but `doctor` and `build` need the extra `cli`, which `import torchddp` does not."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

from torchddp._command import HELP_OPTIONS, only_explains

WITHOUT_TYPER = ("doctor", "build")
WHAT_IS_MISSING = (
    "torchddp: all commands but `doctor` and `build` need more packages: pip install typer rich matplotlib"
)


def main() -> None:
    arguments = sys.argv[1:]
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401

        if find_spec("numpy") is None:  # which matplotlib needs; importing it takes longer than most commands
            raise ModuleNotFoundError
    except ImportError:
        if not arguments or arguments[0] not in WITHOUT_TYPER:
            sys.exit(WHAT_IS_MISSING)
        sys.exit(_run_without_typer(*arguments))
    from torchddp.cli.app import make_app

    completed = os.environ.get("COMP_WORDS", "") + os.environ.get("_TYPER_COMPLETE_ARGS", "")
    app = make_app([*arguments, *completed.split()])
    if only_explains() and {*arguments} <= {*HELP_OPTIONS, "--version"}:
        app(arguments, prog_name="torchddp")  # which exits; it needs nothing that shows results
    from torchddp.harness.command import run_app

    sys.exit(run_app(app, "torchddp", arguments))


def _run_without_typer(name: str, *arguments: str) -> int:
    import argparse
    from typing import get_type_hints

    from torchddp.harness.launch import EXIT_INTERRUPTED, interrupted_once

    command = import_module(f"torchddp.cli.{name}")
    parser = argparse.ArgumentParser(f"torchddp {name}", description=command.HELP.replace("\b\n", ""))
    parser.formatter_class, parser.argument_default = argparse.RawDescriptionHelpFormatter, argparse.SUPPRESS
    options = get_type_hints(command.run, include_extras=True)
    del options["return"]
    for parameter, hint in options.items():
        flag, about = hint.__metadata__[0]
        how = {"action": "store_true"} if hint.__origin__ is bool else {"type": hint.__origin__}
        parser.add_argument(flag, dest=parameter, help=about, **how)
    try:
        with interrupted_once():
            return int(command.run(**vars(parser.parse_args(arguments))))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
