"""An optimizer's step for some of its parameters at a time, with the options of one moment."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

# By parameter group, those of its parameters that are meant: index of the group, parameters.
Part = list[tuple[int, list[torch.Tensor]]]
Options = list[dict[str, Any]]
_MISSING = object()


def parts_of(optimizer: Optimizer, buckets: Sequence[Sequence[torch.Tensor]]) -> tuple[list[Part], Part]:
    """The optimizer's parameters by bucket, and those that are in none."""
    bucket_of = {param: index for index, params in enumerate(buckets) for param in params}
    parts: list[dict[int, list[torch.Tensor]]] = [{} for _ in range(len(buckets) + 1)]
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            parts[bucket_of.get(param, -1)].setdefault(number, []).append(param)
    listed = [list(part.items()) for part in parts]
    return listed[:-1], listed[-1]


def options_of(optimizer: Optimizer) -> Options:
    """What the groups say beside their parameters, as it is now: schedulers change tensors in place."""
    return [
        {key: _copied(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def step(optimizer: Optimizer, part: Part, options: Options) -> None:
    """``optimizer.step()`` for these parameters, with these options.

    What the step itself changes in a group, such as a count of steps, stays changed; each part of a step starts from
    the same ``options``. Everything else in the groups is left as it is.
    """
    undo = []
    with _only(optimizer, part) as groups:
        for group, (number, _) in zip(groups, part, strict=True):
            now = dict(group)
            wanted = {"params": group["params"], **options[number]}
            _replace(group, wanted)
            undo.append((group, now, wanted))
        try:
            optimizer.step()
        finally:
            for group, now, wanted in undo:
                changed = {key: value for key, value in group.items() if value is not wanted.get(key, _MISSING)}
                _replace(group, {**now, **changed})


def _replace(group: dict[str, Any], content: dict[str, Any]) -> None:
    group.clear()
    group.update(content)


def zero_grad(optimizer: Optimizer, part: Part, set_to_none: bool) -> None:
    """``optimizer.zero_grad()`` for these parameters."""
    with _only(optimizer, part):
        optimizer.zero_grad(set_to_none)


@contextmanager
def _only(optimizer: Optimizer, part: Part) -> Iterator[list[dict[str, Any]]]:
    """Meanwhile the optimizer has these parameters alone."""
    all_groups = optimizer.param_groups
    whole = [all_groups[number]["params"] for number, _ in part]
    groups = [all_groups[number] for number, _ in part]
    for group, (_, params) in zip(groups, part, strict=True):
        group["params"] = params
    optimizer.param_groups = groups
    try:
        yield groups
    finally:
        optimizer.param_groups = all_groups
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


@contextmanager
def outside_of_forward(device_type: str) -> Iterator[None]:
    """No gradients, no inference tensors, no autocast, whatever the forward in which this runs has switched on."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", device_type}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
