"""What `import torchddp` asks first: does the extension fit the torch that runs, and is this the `torchddp` command?

libtorch's C++ interface changes between minor versions without its symbols changing: a mismatch does not fail to
load, it crashes later. One readable error instead. The command must start also where the rest of the package can't.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

_COMMAND = "torchddp"
_REBUILD = (
    "Install the torchddp wheel for your torch, or rebuild it here: "
    "pip install --no-build-isolation --force-reinstall torchddp"
)


def check_torch_matches(built: str | None = None, running: str | None = None) -> None:
    """Raise ImportError unless the extension exists and was built for the running torch's major.minor."""
    if running is None:
        import torch

        running = str(torch.__version__)
    if built is None:
        try:
            from torchddp import _C
        except ImportError as error:
            raise ImportError(
                f"torchddp's compiled extension does not load with torch {running}: {error}. "
                f"It is missing, or was built for another Python or torch. {_REBUILD}"
            ) from error
        built = str(_C.torch_version)
    if minor(built) != minor(running):
        raise ImportError(f"torchddp was built for torch {built}, but torch {running} is running. {_REBUILD}")


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of '2.13.0+cpu'."""
    major_text, minor_text = version.split("+")[0].split(".")[:2]
    return int(major_text), int(minor_text)


def is_command(argv: Sequence[str] | None = None, orig_argv: Sequence[str] | None = None) -> bool:
    """True for `torchddp ...` (the installed script) and `python -m torchddp ...`."""
    argv = getattr(sys, "argv", []) if argv is None else argv
    orig_argv = sys.orig_argv if orig_argv is None else orig_argv
    started = argv[0] if argv else ""
    if started == "-m":  # what Python sets while it looks for the module, which imports the package
        return _COMMAND in [after for before, after in zip(orig_argv, orig_argv[1:], strict=False) if before == "-m"]
    return Path(started).name == _COMMAND
