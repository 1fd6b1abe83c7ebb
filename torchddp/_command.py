"""Detects whether this process is the `torchddp` command. If so, Ctrl-C ends it with one line, from this import on, and
its streams are open.

Imported before everything else, and imports almost nothing itself, because Ctrl-C prints a traceback until then.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # built into the interpreter; signal itself imports enum
import io
import os
import sys

_COMMAND = "torchddp"
HELP_OPTIONS = ("-h", "--help")


def is_command() -> bool:
    """True for `torchddp ...` (the installed script) and `python -m torchddp ...`."""
    started = next(iter(getattr(sys, "argv", [])), "")
    if started == "-m":  # set by Python while it looks for the module, which imports the package
        return ("-m", _COMMAND) in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return os.path.basename(started) == _COMMAND


def only_explains() -> bool:
    """True if this process is the command and prints its help, its version or completions: nothing that needs torch."""
    asked = sys.argv[1:]
    return is_command() and (
        not asked or not {*HELP_OPTIONS, "--version"}.isdisjoint(asked) or "_TORCHDDP_COMPLETE" in os.environ
    )


def _open_closed_streams() -> None:
    """As /dev/null, here and in child processes: what is opened later would get their numbers, and be written to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _leave(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


if is_command():
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # where the locale is ASCII, "?" for what it lacks
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _leave)
