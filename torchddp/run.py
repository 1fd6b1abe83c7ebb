"""`python -m torchddp.run script.py args...`: run an unmodified program on torchddp's DistributedDataParallel.

    torchrun --nproc-per-node 2 -m torchddp.run train.py --lr 0.1
    torchrun --nproc-per-node 2 -m torchddp.run -m package.train --lr 0.1

Calls torchddp.install() before the program's first line. The program sees the same sys.argv, `__main__` and sys.path[0]
as under plain Python, and an exception ends the process with its own traceback. Python processes that the program
starts, such as ranks of its own, install torchddp when they import torch: TORCHDDP_INSTALL=1 is set for them, and
PYTHONPATH. Tasks of Slurm's srun get RANK, WORLD_SIZE and the other variables of torchrun, unless they are already set.

    srun --ntasks 4 python -m torchddp.run train.py
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

from torchddp.harness.srun import set_rank_variables
from torchddp.integrations import install

USAGE = "usage: python -m torchddp.run [-h] (script.py | -m module) [args ...]"


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}")
        return
    as_module = arguments[:1] == ["-m"]
    if as_module:
        del arguments[0]
    if not arguments or (not as_module and arguments[0].startswith("-")):
        wrong = f"unknown option {arguments[0]}" if arguments else "which program?"
        print(f"{USAGE}\ntorchddp.run: {wrong}", file=sys.stderr)
        sys.exit(2)
    set_rank_variables()
    install.install()
    install.reach_children()
    (_run_module if as_module else _run_script)(arguments)


def _run_script(arguments: list[str]) -> None:
    path = arguments[0]
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):  # containing a __main__.py
        sys.argv = arguments
        _first_on_path(path)
        runpy.run_path(path, run_name="__main__")
        return
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"torchddp.run: can't open file {os.path.abspath(path)!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    sys.argv = arguments
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    absolute = os.path.abspath(path)
    namespace = _new_main()
    namespace.update(__file__=absolute, __cached__=None)
    exec(compile(source, absolute, "exec", dont_inherit=True), namespace)


def _run_module(arguments: list[str]) -> None:
    sys.argv = ["-m", *arguments[1:]]  # as `python -m` before it has found the module
    _new_main()
    runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]


def _first_on_path(folder: str) -> None:
    """Replace the entry that `python -m` added to sys.path for this module, if there is one."""
    if not getattr(sys.flags, "safe_path", False) and sys.path:
        sys.path[0] = folder


def _new_main() -> dict[str, object]:
    """The program's `__main__`, which stays in place: pickled functions and later processes look there."""
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = __builtins__
    return sys.modules["__main__"].__dict__


if __name__ == "__main__":
    main()
