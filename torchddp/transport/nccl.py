"""How the ranks of a process group make a NCCL communicator of their own: over the group's store, and all or none."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_process_group_store

from torchddp import _C
from torchddp.errors import TransportError
from torchddp.transport.board import prefix_of_attempt
from torchddp.transport.rank_problems import listed
from torchddp.transport.waits import wait_for_keys

__all__ = ["connect"]

# From here on NCCL takes several ranks of one GPU, if this variable is 1.
_SHARED_GPU_VERSION = 23000
_SHARED_GPU_ENV = "NCCL_MULTI_RANK_GPU_ENABLE"
_MEETING_TIMEOUT = datetime.timedelta(minutes=2)
# Meetings so far, by process group: all ranks count alike.
_meetings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# Gives a value to all ranks, and gets theirs, in rank order.
Exchange = Callable[[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class Card:
    """What a rank tells the others before they connect."""

    size: int
    device: str  # equal only for one and the same GPU
    version: int  # of NCCL, as 22907
    shares_gpu: bool  # NCCL was told to take several ranks of one GPU
    id: str  # rank 0's: what all are to connect with
    problem: str

    @classmethod
    def of_this_rank(cls, process_group: Any, device: torch.device) -> Card:
        """This rank's own. Never raises: what went wrong is the problem."""
        version, identity, own_id, problem = 0, "", b"", ""
        try:
            version = _usable_version()
            _check_bound_device(process_group, device)
            identity = _C.device_identity(_index_of(device))
            own_id = _C.make_nccl_id() if process_group.rank() == 0 else b""
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        shares = os.environ.get(_SHARED_GPU_ENV) == "1"
        return cls(process_group.size(), identity, version, shares, own_id.hex(), problem)


def reason_against(cards: Sequence[Card]) -> str:
    """Why these ranks can't make a communicator, the same on all of them; or nothing."""
    if problem := listed([card.problem for card in cards]):
        return problem
    for rank, card in enumerate(cards):
        if card.size != len(cards):
            return f"rank {rank} counts {card.size} ranks in the process group, which has {len(cards)}"
        if card.version != cards[0].version:
            return f"rank 0 runs NCCL {_text(cards[0].version)}, rank {rank} {_text(card.version)}"
    first_on: dict[str, int] = {}
    for rank, card in enumerate(cards):
        other = first_on.setdefault(card.device, rank)
        if other != rank and not (card.shares_gpu and card.version >= _SHARED_GPU_VERSION):
            return (
                f"ranks {other} and {rank} are on the same GPU ({card.device}); NCCL takes one rank a GPU (from 2.30 "
                f"on several, with {_SHARED_GPU_ENV}=1; this is {_text(card.version)})"
            )
    return ""


def connect(process_group: Any, device: torch.device, timeout: datetime.timedelta) -> _C.NcclTransport | str:
    """Collective. A transport on every rank, or on every rank the same reason why not.

    Args:
        device: the CUDA device of this rank's model.
        timeout: how long an operation may take once the device has got to it.
    """
    return meet(process_group, device, timeout, over_store(process_group))


def meet(
    process_group: Any, device: torch.device, timeout: datetime.timedelta, exchange: Exchange
) -> _C.NcclTransport | str:
    """`connect`, over any exchange."""
    card = Card.of_this_rank(process_group, device)
    cards = [Card(**other) for other in exchange(dataclasses.asdict(card))]
    if reason := reason_against(cards):
        return reason
    transport, problem = None, ""
    try:
        transport = _C.NcclTransport(
            bytes.fromhex(cards[0].id),
            rank=process_group.rank(),
            size=process_group.size(),
            device_index=_index_of(device),
            connect_timeout=_MEETING_TIMEOUT,
            timeout=timeout,
        )
    except (RuntimeError, TransportError) as error:
        problem = str(error)
    return listed(exchange(problem)) or transport or "unknown"


def over_store(process_group: Any) -> Exchange:
    """An exchange over the store of the process group: it needs neither a device nor a working backend."""
    store = _get_process_group_store(process_group)
    number = _meetings.get(process_group, 0)
    _meetings[process_group] = number + 1
    rank, size = process_group.rank(), process_group.size()
    rounds = 0

    def exchange(value: Any) -> list[Any]:
        nonlocal rounds
        prefix = f"{prefix_of_attempt()}/nccl/{number}/{rounds}"
        rounds += 1
        store.set(f"{prefix}/{rank}", json.dumps(value))
        keys = [f"{prefix}/{other}" for other in range(size)]
        # What a rank has to say may have taken it as long as connecting may.
        wait_for_keys(store, keys, 2 * _MEETING_TIMEOUT)
        return [json.loads(store.get(key)) for key in keys]

    return exchange


def _usable_version() -> int:
    versions = _C.nccl_versions()
    if versions is None:
        raise RuntimeError("this torchddp was built without CUDA")
    running, built = versions
    if problem := _C.nccl_version_problem(running, built):
        raise RuntimeError(problem)
    return running


def _check_bound_device(process_group: Any, device: torch.device) -> None:
    bound = getattr(process_group, "bound_device_id", None)
    if bound is not None and bound.index is not None and bound.index != _index_of(device):
        raise ValueError(f"the process group is bound to {bound}, but the model is on {device}")


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
