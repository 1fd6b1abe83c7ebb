"""Whether this process is the `torchddp` command, which must start where the rest of the package can't."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

NAME = "torchddp"


def is_command(argv: Sequence[str] | None = None, orig_argv: Sequence[str] | None = None) -> bool:
    """True for `torchddp ...` (the installed script) and `python -m torchddp ...`."""
    argv = getattr(sys, "argv", []) if argv is None else argv
    orig_argv = sys.orig_argv if orig_argv is None else orig_argv
    started = argv[0] if argv else ""
    if started == "-m":  # what Python sets while it looks for the module, which imports the package
        return NAME in [after for before, after in zip(orig_argv, orig_argv[1:], strict=False) if before == "-m"]
    return Path(started).name == NAME
