"""Named checks of what a DistributedDataParallel class must do.

Each takes the class and the rank, runs on every rank inside a process group of two, and raises if the class behaves
otherwise. To keep ranks in step when a check fails, a check makes its collective calls first and asserts afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests import behaviours_grads, behaviours_options, behaviours_state

Check = Callable[[type, int], None]


@dataclass(frozen=True)
class Behaviour:
    """A check with its name; `beyond_torch` says what torch's own class lacks for it."""

    name: str
    check: Check
    beyond_torch: str | None = None


def _collect_behaviours() -> dict[str, Behaviour]:
    found = {}
    for module in (behaviours_grads, behaviours_options, behaviours_state):
        for name, check in vars(module).items():
            if name.startswith("check_"):
                short = name.removeprefix("check_")
                found[short] = Behaviour(short, check, getattr(check, "beyond_torch", None))
    return found


BEHAVIOURS = _collect_behaviours()
