"""What may be given as a communication hook, and hooks that want to know their model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[[Any, Any], Any]


def resolve(spec: object) -> tuple[object, Hook]:
    """State and hook of an argument ``comm_hook=``.

    Args:
        spec: a hook ``hook(state, bucket)``, whose state is then None; a tuple ``(state, hook)``; or a name that
            ``torchddp.comm_hooks`` knows.

    Raises:
        TypeError: anything else.
        ValueError: an unknown name.
    """
    if isinstance(spec, str):
        named: tuple[object, Hook] = importlib.import_module("torchddp.comm_hooks").resolve(spec)
        return named
    if isinstance(spec, tuple) and len(spec) == 2 and callable(spec[1]):
        return spec[0], spec[1]
    if callable(spec):
        return None, spec
    raise TypeError(
        "comm_hook must be a hook(state, bucket), a tuple (state, hook), a name of torchddp.comm_hooks or None, got "
        f"{spec!r}"
    )


def attach(hook: object, model: torch.nn.Module) -> None:
    """Tells the hook which model it is registered with, if it has a method for that. Collective if the method is."""
    method = getattr(hook, "attach", None)
    if callable(method):
        method(model)
