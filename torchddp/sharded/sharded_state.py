"""The state of a sharded optimizer as one: brought together on a rank, and checked before it is taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchddp.transport.agreement import object_of, tensor_of
from torchddp.transport.waits import wait_for_work

MESSAGE_NUMEL = 4 * 2**20  # elements of parameters whose state travels in one message


def to_cpu(value: Any) -> Any:
    """A copy on the CPU, which holds no memory but its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_cpu(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_cpu(inner) for inner in value)
    return value


def gather_state(
    state_of: Callable[[int], Any],
    owners: Sequence[int | None],
    numels: Sequence[int],
    recipient: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[int, Any]:
    """Collective. The state of every parameter by index, on the CPU of ``recipient``; an empty dict elsewhere.

    ``state_of`` gives an owned parameter's state, None if it has none. One owner after the other sends, a few
    parameters at a time; nothing but the recipient holds more than one message.
    """
    found: dict[int, Any] = {}
    for owner in range(group.size()):
        owned = [index for index, rank in enumerate(owners) if rank == owner]
        for indices in _messages(owned, numels):
            states = None
            if group.rank() == owner:
                states = {index: to_cpu(state_of(index)) for index in indices}
            if owner != recipient:
                states = _pass_on(states, owner, recipient, group, device)
            if group.rank() == recipient and states is not None:
                found.update({index: state for index, state in states.items() if state is not None})
    return dict(sorted(found.items()))


def _messages(indices: Sequence[int], numels: Sequence[int]) -> Iterator[list[int]]:
    """The indices in runs of about MESSAGE_NUMEL elements, the same on all ranks."""
    run: list[int] = []
    for index in indices:
        if run and sum(numels[i] for i in run) + numels[index] > MESSAGE_NUMEL:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def _pass_on(value: Any, source: int, target: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Collective. The value of ``source`` on ``target``, None elsewhere.

    By all_to_all of nothing but that: some backends have no send.
    """
    payload = torch.empty(0, dtype=torch.uint8, device=device)
    if group.rank() == source:
        payload = tensor_of(value).to(device)
    size = torch.tensor([payload.numel()] if group.rank() == source else [], dtype=torch.int64, device=device)
    length = int(_to_target(size, 1, source, target, group)[:1].sum())
    received = _to_target(payload, length, source, target, group)
    return object_of(received) if group.rank() == target else None


def _to_target(data: torch.Tensor, numel: int, source: int, target: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Collective. ``data`` of ``source`` on ``target``, which knows its number of elements."""
    sends, receives = [0] * group.size(), [0] * group.size()
    if group.rank() == source:
        sends[target] = data.numel()
    if group.rank() == target:
        receives[source] = numel
    received = torch.empty(sum(receives), dtype=data.dtype, device=data.device)
    wait_for_work(dist.all_to_all_single(received, data, receives, sends, group=group, async_op=True), group)
    return received


def index_of_ids(saved_groups: Sequence[Mapping[str, Any]]) -> dict[Any, int]:
    """What index a saved parameter id stands for: the order of the saved groups, as torch matches them."""
    ids = [param_id for group in saved_groups for param_id in group["params"]]
    return {param_id: index for index, param_id in enumerate(ids)}


def check_groups(saved: Mapping[str, Any], group_sizes: Sequence[int]) -> None:
    """Raises ValueError unless ``saved`` is a state dict of an optimizer with such parameter groups."""
    missing = [key for key in ("state", "param_groups") if key not in saved]
    if missing:
        raise ValueError(f"this is no state dict of an optimizer: it has no {missing[0]!r}")
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if len(sizes) != len(group_sizes):
        raise ValueError(
            f"the state dict is of another model: it has {len(sizes)} parameter groups, the optimizer "
            f"{len(group_sizes)}"
        )
    for number, (theirs, ours) in enumerate(zip(sizes, group_sizes, strict=True)):
        if theirs != ours:
            raise ValueError(
                f"the state dict is of another model: its parameter group {number} has {theirs} parameters, the "
                f"optimizer's {ours}"
            )


def check_shapes(
    state: Mapping[int, Any],
    params: Sequence[torch.Tensor],
    name_of: Callable[[int], str],
    live: Mapping[torch.Tensor, Mapping[str, Any]],
    torch_own: bool,
) -> None:
    """Raises ValueError if a tensor of ``state`` (by index) can't belong to its parameter.

    What the ``live`` state (by parameter) holds as well must have its shape; with ``torch_own`` the rules of torch's
    optimizers hold: of the parameter's shape or a scalar, but for Adafactor's row and column.
    """
    for index, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"the state dict's entry for {name_of(index)} is a {type(entry).__name__}, not a dict")
        param = params[index]
        for key, value in entry.items():
            if not isinstance(value, torch.Tensor):
                continue
            present = live.get(param, {}).get(key)
            unlike = isinstance(present, torch.Tensor) and present.shape != value.shape
            if unlike or (torch_own and not _fits(key, value, param)):
                raise ValueError(
                    f"the state dict is of another model: its {key!r} for {name_of(index)} has shape "
                    f"{list(value.shape)}, which does not fit the parameter's {list(param.shape)}"
                )


def _fits(key: str, value: torch.Tensor, param: torch.Tensor) -> bool:
    if value.dim() == 0 or value.shape == param.shape or (key == "step" and value.numel() == 1):
        return True
    if key not in ("row_var", "col_var") or value.dim() != param.dim():
        return False
    return all(size in (1, whole) for size, whole in zip(value.shape, param.shape, strict=True))
