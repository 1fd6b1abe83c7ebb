"""How the ranks of a process group make a NCCL communicator of their own: over the group's store, and all or none."""

from __future__ import annotations

import dataclasses
import datetime
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.transport.agreement import Peer, StoreExchange, backend_of, connect_all, part_of_store

# From here on NCCL takes several ranks of one GPU, if this variable is 1.
_SHARED_GPU_VERSION = 23000
_SHARED_GPU_ENV = "NCCL_MULTI_RANK_GPU_ENABLE"
_CONNECT_TIMEOUT = datetime.timedelta(minutes=2)
_UNSET = -(2**31)  # what NCCL calls undefined

# By process group and device: the last communicator and its id. It lives for as long as a transport over it. All models
# over a group share one, as they share that of torch's own NCCL.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[str, _C.SharedNccl]]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NcclPeer(Peer):
    """See `Peer`."""

    size: int
    device: str  # equal only for one and the same GPU
    version: int  # of NCCL, as 22907
    shares_gpu: bool  # NCCL was told to take several ranks of one GPU
    shared: str  # the id of the communicator that the rank's models use already; empty for none, or a broken one

    @classmethod
    def of_this_rank(cls, process_group: dist.ProcessGroup, device: torch.device, shared: str) -> NcclPeer:
        """This rank's own. Never raises: what went wrong is the problem."""
        version, identity, problem = 0, "", ""
        try:
            if (versions := _C.nccl_versions()) is None:
                raise RuntimeError("this torchddp was built without CUDA")
            if unfit := _C.nccl_version_problem(*versions):
                raise RuntimeError(unfit)
            version = versions[0]
            bound = getattr(process_group, "bound_device_id", None)
            if bound is not None and bound.index is not None and bound.index != _index_of(device):
                raise ValueError(f"the process group is bound to {bound}, but the model is on {device}")
            NcclOptions.of(process_group, device)
            identity = _C.device_identity(_index_of(device))
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        return cls(
            problem=problem,
            size=process_group.size(),
            device=identity,
            version=version,
            shares_gpu=os.environ.get(_SHARED_GPU_ENV) == "1",
            shared=shared,
        )


@dataclasses.dataclass(frozen=True)
class NcclOptions:
    """What the user has asked NCCL for: the options of the process group's own NCCL, where it has one.

    Attributes:
        settings, net_name: fields of ncclConfig_t by torch's names for them, without those that are unset.
        high_priority: of the stream that operations are queued on.
    """

    settings: dict[str, int] = dataclasses.field(default_factory=dict)
    net_name: str = ""
    high_priority: bool = False

    @classmethod
    def of(cls, process_group: dist.ProcessGroup, device: torch.device) -> NcclOptions:
        """RuntimeError for one that can't be given to our communicator."""
        options = getattr(backend_of(process_group, device.type), "options", None)
        config = getattr(options, "config", None)
        values: dict[str, Any] = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
        wanted = {k: v for k, v in values.items() if isinstance(v, int | str) and v not in (_UNSET, "")}
        if getattr(process_group, "bound_device_id", None) is not None:
            wanted.pop("blocking", None)  # torch sets it itself then
        for name in sorted(wanted.keys() - set(_C.nccl_settings())):
            raise RuntimeError(
                f"the process group's NCCL options have {name}={wanted[name]!r}, which this torchddp can't set: build "
                "it with a newer NCCL, or leave the option unset"
            )
        return cls(
            {name: int(value) for name, value in wanted.items() if name != "net_name"},
            str(wanted.get("net_name", "")),
            bool(getattr(options, "is_high_priority_stream", False)),
        )


def reason_against(peers: Sequence[NcclPeer]) -> str:
    """Why these ranks can't make a communicator, the same on all of them; or nothing."""
    for rank, peer in enumerate(peers):
        if peer.size != len(peers):
            return f"rank {rank} counts {peer.size} ranks in the process group, which has {len(peers)}"
        if peer.version != peers[0].version:
            return f"rank 0 runs NCCL {_text(peers[0].version)}, rank {rank} {_text(peer.version)}"
    first_on: dict[str, int] = {}
    for rank, peer in enumerate(peers):
        other = first_on.setdefault(peer.device, rank)
        if other != rank and not (peer.shares_gpu and peer.version >= _SHARED_GPU_VERSION):
            return (
                f"ranks {other} and {rank} are on the same GPU ({peer.device}); NCCL takes one rank a GPU (from 2.30 "
                f"on several, with {_SHARED_GPU_ENV}=1; this is {_text(peer.version)})"
            )
    return ""


def connect(
    process_group: dist.ProcessGroup,
    device: torch.device,
    timeout: datetime.timedelta,
    exchange: StoreExchange | None = None,
) -> _C.NcclTransport | str:
    """Collective. A transport on every rank, or on every rank the same reason why not.

    All models on one device over one process group share a communicator: `interrupt` of one's transport ends it for
    all, and the next model gets another one.

    Args:
        device: the CUDA device of this rank's model.
        timeout: how long an operation of this transport may take: NCCL's call, in which it may have to connect to the
            other ranks, and then the operation, once the device has got to it.
        exchange: None: over the group's store.
    """
    rank, size, index = process_group.rank(), process_group.size(), _index_of(device)
    if exchange is None:
        # What a rank has to say may have taken it as long as connecting may.
        store = part_of_store(process_group, "nccl")
        exchange = StoreExchange(store, rank, size, 2 * _CONNECT_TIMEOUT, "the set-up of NCCL")
    communicators = _communicators.setdefault(process_group, {})
    shared_id, shared = communicators.get(index, ("", None))
    at_hand = None if shared is None else shared.open(timeout)  # kept until all ranks have told

    def join(peers: Sequence[NcclPeer]) -> _C.NcclTransport:
        if at_hand is not None and all(peer.shared == shared_id for peer in peers):
            return at_hand
        own_id, problem = _new_id() if rank == 0 else ("", "")
        told = exchange.gather([own_id, problem])[0]
        if told[1]:
            raise RuntimeError(told[1])
        options = NcclOptions.of(process_group, device)
        made = _C.NcclTransport(
            bytes.fromhex(told[0]),
            rank=rank,
            size=size,
            device_index=index,
            settings=options.settings,
            net_name=options.net_name,
            high_priority=options.high_priority,
            connect_timeout=_CONNECT_TIMEOUT,
            timeout=timeout,
        )
        communicators[index] = told[0], made.shared
        return made

    own = NcclPeer.of_this_rank(process_group, device, "" if at_hand is None else shared_id)
    return connect_all(exchange, own, reason_against, join)


def _new_id() -> tuple[str, str]:
    """One for a communicator, and why not."""
    try:
        return _C.make_nccl_id().hex(), ""
    except RuntimeError as error:
        return "", f"no id from rank 0: {error}"


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
