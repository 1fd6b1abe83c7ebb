"""Checks that all ranks wrap the same model; if not, raises one error that says what differs and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from torchddp.transport.agreement import Agreement

Value = TypeVar("Value")

MAX_DIFFERENCES = 8


@dataclass(frozen=True)
class ParamDescription:
    """What must agree between ranks for one parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


def describe(
    parameters: Sequence[torch.Tensor], names: Sequence[str], bucket_dtypes: Sequence[torch.dtype] | None = None
) -> list[ParamDescription]:
    return [
        ParamDescription(
            name,
            tuple(p.shape),
            tuple(p.stride()) if p.layout == torch.strided else (),
            _dtype_in_words(p.dtype, reduced_in),
        )
        for p, name, reduced_in in zip(parameters, names, bucket_dtypes or [p.dtype for p in parameters], strict=True)
    ]


def _dtype_in_words(dtype: torch.dtype, reduced_in: torch.dtype) -> str:
    text = str(dtype).removeprefix("torch.")
    return text if reduced_in == dtype else f"{text} (reduced in {str(reduced_in).removeprefix('torch.')})"


@dataclass(frozen=True)
class ModelDescription:
    """What a wrapper sends of a model: parameters that are reduced, others that are copied from rank 0, and buffers
    that are copied then or later. ``ignored``: the names of what is left alone.
    """

    params: list[ParamDescription]
    frozen: list[ParamDescription] = field(default_factory=list)
    buffers: list[ParamDescription] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def _ignored_on_some(by_rank: Sequence[ModelDescription]) -> list[str]:
    """Ranks may ignore what only they have, but not what others send."""
    found = []
    for sender, model in enumerate(by_rank):
        sent = {d.name for d in (*model.params, *model.frozen, *model.buffers)}
        for rank, other in enumerate(by_rank):
            if names := sorted(sent.intersection(other.ignored)):
                shown = f"{', '.join(map(repr, names[:MAX_DIFFERENCES]))} {'is' if len(names) == 1 else 'are'}"
                found.append(f"rank {rank}: {shown} in parameters_to_ignore, but not on rank {sender}")
    return found


def find_differences(by_rank: Sequence[Sequence[ParamDescription]], what: str = "params") -> list[str]:
    """Describe every rank whose parameters don't match rank 0's; empty if they can be sent together.

    Names may differ (a rank may use other names for the same layers), unless the same names appear in another order:
    gradients would then be added to those of other layers.
    """
    found: list[str] = []
    reference = by_rank[0]
    for rank, mine in enumerate(by_rank[1:], start=1):
        if len(mine) != len(reference):
            found.append(_count_difference(rank, reference, mine, what))
            continue
        names, reference_names = [d.name for d in mine], [d.name for d in reference]
        if names != reference_names and sorted(names) == sorted(reference_names):
            at = next(i for i, (a, b) in enumerate(zip(reference_names, names, strict=True)) if a != b)
            found.append(
                f"rank {rank}: {what}[{at}] is '{names[at]}', on rank 0 '{reference_names[at]}': the same names in "
                "another order. Register modules in the same order on all ranks"
            )
            continue
        for i, (theirs, ours) in enumerate(zip(reference, mine, strict=True)):
            if (theirs.shape, theirs.stride, theirs.dtype) != (ours.shape, ours.stride, ours.dtype):
                found.append(_param_difference(rank, i, theirs, ours, what))
    return found


def _count_difference(
    rank: int, reference: Sequence[ParamDescription], mine: Sequence[ParamDescription], what: str
) -> str:
    text = (
        f"DDP expects same model across all ranks, but Rank 0 has {len(reference)} {what}, "
        f"while rank {rank} has inconsistent {len(mine)} {what}."
    )
    for who, own, others in (("Rank 0", reference, mine), (f"rank {rank}", mine, reference)):
        known = {d.name for d in others}
        if only := [f"'{d.name}'" for d in own if d.name not in known]:
            text += f" Only {who} has {', '.join(only[:MAX_DIFFERENCES])}."
    return text


def _param_difference(rank: int, index: int, theirs: ParamDescription, ours: ParamDescription, what: str) -> str:
    if theirs.shape != ours.shape:
        kind, got, expected = "sizes", str(list(ours.shape)), str(list(theirs.shape))
    elif theirs.dtype != ours.dtype:
        kind, got, expected = "dtype", ours.dtype, theirs.dtype
    else:
        kind, got, expected = "strides", str(list(ours.stride)), str(list(theirs.stride))
    return f"rank {rank}: {what}[{index}] '{ours.name}' has {kind} {got}; on rank 0 ('{theirs.name}') it has {expected}"


def agree_on_model(
    agreement: Agreement, model: ModelDescription, options: Mapping[str, str], own: Value
) -> list[Value] | None:
    """Collective. Every rank's ``own`` if some differ, else None.

    Raises on every rank: RuntimeError if the models differ, ValueError if the options do. Costs one all-gather of an
    integer if all are equal; descriptions are only sent if they are not.
    """
    by_rank = agreement.gather((options, model, own))
    if by_rank is None:
        return None
    agreement.check_options([theirs for theirs, _, _ in by_rank])
    models = [theirs for _, theirs, _ in by_rank]
    differences: list[str] = []
    for what in ("params", "frozen", "buffers"):
        differences += find_differences([getattr(theirs, what) for theirs in models], what)
    differences += _ignored_on_some(models)
    if not differences:
        return [theirs for *_, theirs in by_rank]
    more = len(differences) - MAX_DIFFERENCES
    text = "\n".join(differences[:MAX_DIFFERENCES]) + (f"\n... and {more} more differences" if more > 0 else "")
    raise RuntimeError(
        f"The model that is wrapped in DistributedDataParallel is not the same on all ranks.\n{text}\nBuild the model "
        "from the same arguments on every rank."
    )
