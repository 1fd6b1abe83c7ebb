"""Which keyword arguments a strategy hands on to the wrapper."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable

# The strategy knows them itself.
_OF_THE_STRATEGY = frozenset({"self", "module", "sharded_optimizer", "device_ids", "timeout"})


def check_options(strategy: str, wrapper: type, given: Iterable[str]) -> None:
    """TypeError for the first name that ``wrapper`` does not take, with the nearest ones that it does.

    Lightning's own strategies find out when the model is wrapped, in all processes.
    """
    known = sorted(set(inspect.signature(wrapper.__init__).parameters) - _OF_THE_STRATEGY)  # type: ignore[misc]
    for name in given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=2)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"It takes its own and: {', '.join(known)}"
        raise TypeError(f"{strategy} got an argument {name!r} that torchddp.{wrapper.__name__} does not take. {hint}")
