"""A sharded optimizer's state as a whole: gathered on one rank, and checked before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchddp import _torch
from torchddp.sharded.partition import ParameterPartition, pack
from torchddp.transport.agreement import message_device, object_of, tensor_of
from torchddp.transport.waits import run_collective

T = TypeVar("T")
_OTHER = "the state dict is of another model"
MESSAGE_NUMEL = 4 * 2**20  # elements of parameters whose state is sent in one message


def gather_state(
    state: Mapping[Any, Any], parameters: ParameterPartition, recipient: int, group: dist.ProcessGroup
) -> dict[Any, Any] | None:
    """The state of all ranks' parameters on the CPU of ``recipient``; None elsewhere. Collective."""
    params = parameters.params
    found: dict[int, Any] = {}
    for owner, indices in pack(parameters.owners, [param.numel() for param in params], MESSAGE_NUMEL):
        sent = None
        if group.rank() == owner:
            sent = {index: _to_cpu(state[params[index]]) for index in indices if params[index] in state}
        if owner != recipient:
            sent = _send_object(sent, owner, recipient, group)
        if group.rank() == recipient and sent is not None:
            found.update(sent)
    if group.rank() != recipient:
        return None
    # State that belongs to no parameter is on every rank.
    others = {key: _to_cpu(value) for key, value in state.items() if not isinstance(key, torch.Tensor)}
    return {**{params[index]: found[index] for index in sorted(found)}, **others}


def _to_cpu(value: T) -> T:
    """Copy tensors in dicts, lists and tuples to the CPU, each with its own memory."""
    copied: T = _torch.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)
    return copied


def _send_object(value: T, source: int, target: int, group: dist.ProcessGroup) -> T | None:
    """Send the value of ``source`` to ``target``; None elsewhere. Collective: not all backends can send."""
    device = message_device(group)
    payload = torch.empty(0, dtype=torch.uint8, device=device)
    if group.rank() == source:
        payload = tensor_of(value).to(device)
    size = torch.tensor([payload.numel()] if group.rank() == source else [], dtype=torch.int64, device=device)
    length = int(_send_tensor(size, 1, source, target, group)[:1].sum())
    received = _send_tensor(payload, length, source, target, group)
    return object_of(received) if group.rank() == target else None


def _send_tensor(data: torch.Tensor, numel: int, source: int, target: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Send ``data`` of ``source`` to ``target``, which knows its number of elements. Collective."""
    sends, receives = [0] * group.size(), [0] * group.size()
    if group.rank() == source:
        sends[target] = data.numel()
    if group.rank() == target:
        receives[source] = numel
    received = torch.empty(sum(receives), dtype=data.dtype, device=data.device)
    run_collective(
        lambda: dist.all_to_all_single(received, data, receives, sends, group=group, async_op=True),
        group,
        f"sending the state of rank {source} to rank {target}",
    )
    return received


def check_state(
    saved: Mapping[str, Any],
    kinds: Sequence[str],
    param_groups: Sequence[Mapping[str, Any]],
    parameters: ParameterPartition,
    live: Mapping[torch.Tensor, Mapping[str, Any]],
    torch_own: bool,
) -> tuple[dict[int, Any], dict[Any, Any]]:
    """A saved state dict's state by parameter index, and what belongs to no parameter. ValueError for another model's.

    ``kinds``: the names of the groups' classes, which the state of an `OSS` with several also has. Values that the
    optimizer's ``live`` state (by parameter) has, too, must have the same shape. With ``torch_own`` the rules of
    torch's optimizers apply: the parameter's shape or a scalar, except for Adafactor's row and column.
    """
    if missing := [key for key in ("state", "param_groups") if key not in saved]:
        raise ValueError(f"this is not an optimizer's state dict: it has no {missing[0]!r}")
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if len(sizes) != len(param_groups):
        raise ValueError(f"{_OTHER}: it has {len(sizes)} parameter groups, the optimizer {len(param_groups)}")
    for number, (theirs, group) in enumerate(zip(sizes, param_groups, strict=True)):
        if (kind := saved["param_groups"][number].get("optim", kinds[number])) != kinds[number]:
            raise ValueError(f"{_OTHER}: its parameter group {number} was stepped by {kind}, not by {kinds[number]}")
        if theirs != len(group["params"]):
            own = len(group["params"])
            raise ValueError(f"{_OTHER}: its parameter group {number} has {theirs} parameters, the optimizer's {own}")
    # As in torch, the order of the saved groups maps saved parameter ids to indices.
    ids = [param_id for group in saved["param_groups"] for param_id in group["params"]]
    index_of = {param_id: index for index, param_id in enumerate(ids)}
    by_index = {index_of[key]: value for key, value in saved["state"].items() if key in index_of}
    for index, entry in by_index.items():
        param, name = parameters.params[index], parameters.names[index]
        if not isinstance(entry, Mapping):
            raise ValueError(f"the state dict's entry for {name} is a {type(entry).__name__}, not a dict")
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor):
                continue
            present = live.get(param, {}).get(key)
            unlike = isinstance(present, torch.Tensor) and present.shape != value.shape
            if unlike or (torch_own and not _fits(key, value, param)):
                shapes = f"{list(value.shape)}, which does not fit the parameter's {list(param.shape)}"
                raise ValueError(f"{_OTHER}: its {key!r} for {name} has shape {shapes}")
    return by_index, {key: value for key, value in saved["state"].items() if key not in index_of}


def _fits(key: str, value: torch.Tensor, param: torch.Tensor) -> bool:
    if value.dim() == 0 or value.shape == param.shape or (key == "step" and value.numel() == 1):
        return True
    if key not in ("row_var", "col_var") or value.dim() != param.dim():
        return False
    return all(size in (1, whole) for size, whole in zip(value.shape, param.shape, strict=True))
