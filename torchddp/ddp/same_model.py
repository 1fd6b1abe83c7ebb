"""Checks that all ranks wrap the same model; if not, raises one error that says what differs and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchddp.transport.agreement import GroupExchange, gather_if_different

MAX_DIFFERENCES = 8


# What ranks may have chosen differently, and the options to make equal.
_CHOICES = (
    ("chose different transports", "transport= and the same TORCHDDP_TRANSPORT"),
    ("would reduce large gradients in different ways", "adopt_large_gradients= and the same gradient_as_bucket_view="),
    ("would send gradients to other hosts in different dtypes", "wire_dtype="),
)


@dataclass(frozen=True)
class ParamDescription:
    """What must agree between ranks for one parameter that DDP reduces."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"'{self.name}' {self.dtype}{list(self.shape)}"


def describe(
    parameters: Sequence[torch.Tensor], names: Sequence[str], bucket_dtypes: Sequence[torch.dtype] | None = None
) -> list[ParamDescription]:
    return [
        ParamDescription(name, tuple(p.shape), tuple(p.stride()), _dtype_in_words(p.dtype, reduced_in))
        for p, name, reduced_in in zip(parameters, names, bucket_dtypes or [p.dtype for p in parameters], strict=True)
    ]


def _dtype_in_words(dtype: torch.dtype, reduced_in: torch.dtype) -> str:
    text = str(dtype).removeprefix("torch.")
    return text if reduced_in == dtype else f"{text} (reduced in {str(reduced_in).removeprefix('torch.')})"


def find_differences(by_rank: Sequence[Sequence[ParamDescription]]) -> list[str]:
    """Describe every rank whose parameters don't match rank 0's; empty if gradients can be reduced together.

    Names may differ (a rank may use other names for the same layers), unless the same names appear in another order:
    gradients would then be added to those of other layers.
    """
    found: list[str] = []
    reference = by_rank[0]
    for rank, mine in enumerate(by_rank[1:], start=1):
        if len(mine) != len(reference):
            found.append(_count_difference(rank, reference, mine))
            continue
        names, reference_names = [d.name for d in mine], [d.name for d in reference]
        if names != reference_names and sorted(names) == sorted(reference_names):
            at = next(i for i, (a, b) in enumerate(zip(reference_names, names, strict=True)) if a != b)
            found.append(
                f"[{rank}]: params[{at}] is '{names[at]}' in this process, '{reference_names[at]}' in process 0: "
                f"the parameters of Rank {rank} are registered in a different order from those of Rank 0"
            )
            continue
        for i, (theirs, ours) in enumerate(zip(reference, mine, strict=True)):
            if (theirs.shape, theirs.stride, theirs.dtype) != (ours.shape, ours.stride, ours.dtype):
                found.append(_param_difference(rank, i, theirs, ours))
    return found


def _count_difference(rank: int, reference: Sequence[ParamDescription], mine: Sequence[ParamDescription]) -> str:
    reference_names, names = {d.name for d in reference}, {d.name for d in mine}
    text = (
        f"DDP expects same model across all ranks, but Rank 0 has {len(reference)} params, "
        f"while rank {rank} has inconsistent {len(mine)} params."
    )
    only_reference = [f"'{d.name}'" for d in reference if d.name not in names]
    only_mine = [f"'{d.name}'" for d in mine if d.name not in reference_names]
    if only_reference:
        text += f" Only Rank 0 has {', '.join(only_reference[:MAX_DIFFERENCES])}."
    if only_mine:
        text += f" Only rank {rank} has {', '.join(only_mine[:MAX_DIFFERENCES])}."
    return text


def _param_difference(rank: int, index: int, theirs: ParamDescription, ours: ParamDescription) -> str:
    if theirs.shape != ours.shape:
        what, got, expected = "sizes", list(ours.shape), list(theirs.shape)
    elif theirs.dtype != ours.dtype:
        return (
            f"[{rank}]: params[{index}] ('{ours.name}') in this process has dtype {ours.dtype}, "
            f"in process 0 ('{theirs.name}') dtype {theirs.dtype}"
        )
    else:
        what, got, expected = "strides", list(ours.stride), list(theirs.stride)
    return (
        f"[{rank}]: params[{index}] ('{ours.name}') in this process with {what} {got} appears not to match {what} "
        f"of the same param in process 0 ('{theirs.name}', {expected})"
    )


def verify_same_model(
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    process_group: dist.ProcessGroup,
    device: torch.device,
    transport: str,
    adopt_bytes: int = 0,
    wire_dtype: torch.dtype | None = None,
    bucket_dtypes: Sequence[torch.dtype] | None = None,
) -> None:
    """Collective. Raise RuntimeError on every rank unless the parameters agree, ValueError unless the other values do.

    Parameters must agree in number, order, shape, strides and dtype, including the dtype of their buckets.
    ``adopt_bytes``, ``wire_dtype``: as in `DDPOptions`. Costs one all-gather of an integer if they agree; full
    descriptions are only sent if they don't.
    """
    if process_group.size() == 1:
        return
    choices = (repr(transport), "in place" if adopt_bytes > 0 else "in their buckets", str(wire_dtype))
    mine = (choices, describe(parameters, names, bucket_dtypes))
    by_rank = gather_if_different(mine, GroupExchange(process_group, device))
    if by_rank is None:
        return
    for choice, (what, options) in zip(zip(*(choices for choices, _ in by_rank), strict=True), _CHOICES, strict=True):
        if len(set(choice)) > 1:
            listed = ", ".join(f"rank {rank}: {chosen}" for rank, chosen in enumerate(choice))
            raise ValueError(f"The ranks {what} ({listed}). Give all of them the same {options}.")
    differences = find_differences([descriptions for _, descriptions in by_rank])
    if not differences:
        return
    more = len(differences) - MAX_DIFFERENCES
    text = "\n".join(differences[:MAX_DIFFERENCES]) + (f"\n... and {more} more differences" if more > 0 else "")
    raise RuntimeError(
        "The model that is wrapped in DistributedDataParallel is not the same on all ranks. DDP expects same model "
        f"across all ranks.\n{text}\nBuild the model from the same arguments on every rank."
    )
