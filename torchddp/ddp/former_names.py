"""Arguments under the names that they had before 1.0, and arguments that don't exist."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final, ParamSpec, TypeVar

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torchddp.ddp.checks import Checks
from torchddp.ddp.grad_precision import Precision
from torchddp.errors import nearest_name, warn_user

P = ParamSpec("P")
R = TypeVar("R")

# The former name of a field, and where it is now: an argument of DistributedDataParallel and its field.
FORMER: Final = {
    "wire_dtype": ("precision", "wire"),
    "reduce_dtype": ("precision", "reduce"),
    "main_grads": ("precision", "main_grads"),
    "main_grads_as": ("precision", "main_grads_as"),
    "find_nonfinite": ("checks", "nonfinite"),
    "check_parameters_every": ("checks", "parameters_every"),
    "stall_report_s": ("checks", "stall_report"),
    "gradient_stats": ("checks", "gradient_stats"),
    "zero_weights": ("checks", "zero_weights"),
}
SETTINGS: Final[dict[str, type[Precision] | type[Checks]]] = {"precision": Precision, "checks": Checks}
_NOTHING: Mapping[str, str] = {}
_FEW = 10  # arguments that an error may list
# Arguments of a newer torch that have no effect here.
_NEWER: Final = {"lazy_bucket_allocation"} & inspect.signature(TorchDDP.__init__).parameters.keys()
_NOW: Final = {now: former for former, now in FORMER.items()}


def label(argument: str, field: str) -> str:
    """The field of an argument, in words that a program with the former name recognizes too."""
    former = _NOW.get((argument, field))
    return f"{argument}.{field}" + ("" if former in (field, None) else f" (formerly {former})")


def accepts_former_names(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function take the former names of its arguments' fields, with a FutureWarning.

    Another argument that doesn't exist is a TypeError which says what to use: ``instead`` by name, or the nearest.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.keys() <= set(known):
                return function(*args, **current(kwargs, known, function.__qualname__, instead))
            return function(*args, **kwargs)

        return called

    return decorate


def current(
    given: Mapping[str, Any], known: Collection[str], who: str, instead: Mapping[str, str] = _NOTHING
) -> dict[str, Any]:
    """``given`` by today's names, of which ``who`` takes those ``known``. See `accepts_former_names`."""
    options = {name: value for name, value in given.items() if name in known}
    for name, value in given.items():
        argument, field = FORMER.get(name, ("", ""))
        if name in known or name in _NEWER:
            continue
        if name in instead:
            raise TypeError(f"{who}() got an unexpected keyword argument {name!r}: use {instead[name]}")
        if name == "adopt_large_gradients" and "gradient_as_bucket_view" in known:
            warn_user(
                f"adopt_large_gradients={value} has no effect: gradient_as_bucket_view=True packs all gradients",
                FutureWarning,
            )
        elif argument in known:
            kind = SETTINGS[argument]
            warn_user(
                f"{name}= is deprecated: pass {argument}=torchddp.{kind.__name__}({field}={value!r})", FutureWarning
            )
            before = kind() if options.get(argument) is None else options[argument]
            if not isinstance(before, kind):
                raise TypeError(f"{who}() got both {argument}={before!r} and {name}={value!r}: leave one out")
            options[argument] = replace(before, **{field: value})
        else:
            near = nearest_name(name, known)
            taken = f"; it takes {', '.join(known)}" if len(known) < _FEW else ""
            hint = f". Did you mean {near!r}?" if near else taken
            raise TypeError(f"{who}() got an unexpected keyword argument {name!r}{hint}")
    return options


# Their errors, too, name the nearest field.
Checks.__init__ = accepts_former_names()(Checks.__init__)  # type: ignore[method-assign]
Precision.__init__ = accepts_former_names()(Precision.__init__)  # type: ignore[method-assign]
