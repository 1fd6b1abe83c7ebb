"""Parameter groups as torch's optimizers have them: dicts of parameters and options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from torchddp.transport.agreement import in_words

Group = Mapping[str, Any]

# Keys of a parameter group that OSS and the optimizers each keep for themselves; the rest are shared.
OWN_KEYS = ("params", "param_names", "optim")


def options_of(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OWN_KEYS}


def groups_of(params: ParamsT) -> list[dict[str, Any]]:
    """The groups that torch's constructor makes of its first argument. TypeError if that is a tensor."""
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params must be an iterable of Tensors or dicts, got {torch.typename(params)}")
    given: list[Any] = list(params)
    if given and not isinstance(given[0], dict):
        return [{"params": given}]
    if any(not isinstance(group, dict) for group in given):
        raise TypeError("params holds groups and other things: all must be dicts")
    return given  # not copies: as in torch, the program's dicts become the groups


def options_in_words(groups: Iterable[Group]) -> dict[str, str]:
    return {
        f"{key} of group {number}": in_words(value)
        for number, group in enumerate(groups)
        for key, value in options_of(group).items()
    }


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for theirs, ours in zip(source, target, strict=True):
        ours.update(options_of(theirs))
