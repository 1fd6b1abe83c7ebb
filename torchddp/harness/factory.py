"""The user's own model, by `package.module:factory`."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchddp.harness.model_spec import ModelSpec, default_loss
from torchddp.harness.variants import ArgumentError

CONTRACT = (
    "it must return (module, batch) or (module, batch, loss): batch is a tensor, a tuple or dict of the module's "
    "arguments, or a function of a torch.Generator that makes one; loss is a function of the module's output"
)


def find_factory(path: str) -> Callable[[], Any]:
    """The callable at `package.module:name`; ArgumentError in one sentence if there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ArgumentError(f"--model wants the name of a built-in model or package.module:factory, not '{path}'.")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the installed command does not
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing the user's code may raise anything
        raise ArgumentError(f"--model {path}: cannot import '{module_name}': {one_line(error)}.") from error
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if not callable(found):
        raise ArgumentError(f"--model {path}: module '{module_name}' has no function or class named '{name}'.")
    return found


@functools.cache
def load_factory(path: str, seed: int = 0) -> ModelSpec:
    """Call the factory, once per process; ArgumentError in one sentence if it raises or returns something else."""
    factory = find_factory(path)
    torch.manual_seed(seed)
    try:
        made = factory()
    except Exception as error:
        raise ArgumentError(f"--model {path}: the factory raised {type(error).__name__}: {one_line(error)}.") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ArgumentError(f"--model {path}: the factory returned a {type(made).__name__}; {CONTRACT}.")
    module, batch = made[:2]
    loss: Callable[[Any], Tensor] = made[2] if len(made) == 3 else default_loss
    if not any(p.requires_grad for p in module.parameters()):
        raise ArgumentError(f"--model {path}: no parameter of the module requires a gradient.")
    if not callable(loss):
        raise ArgumentError(f"--model {path}: the factory's loss is a {type(loss).__name__}; {CONTRACT}.")
    if callable(batch) and not isinstance(batch, Tensor):
        return ModelSpec(path, lambda: module, batch, loss)
    if not isinstance(batch, (Tensor, tuple, list, dict)):
        raise ArgumentError(f"--model {path}: the factory's batch is a {type(batch).__name__}; {CONTRACT}.")
    return ModelSpec(path, lambda: module, lambda generator: batch, loss, batches_differ=False)


def one_line(error: Exception) -> str:
    """The message of an error, as part of a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
