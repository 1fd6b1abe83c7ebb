"""Creates an NCCL communicator for the ranks of a process group, through its store: on all of them or on none."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import logging
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchddp import _C, _torch
from torchddp.transport.agreement import Peer, StoreExchange, backend_of, connect_all, host_of
from torchddp.transport.nccl_choice import NcclChoice, choose, may_use_nvls, may_use_sharp
from torchddp.transport.store import is_first_in_job, part_of_store

logger = logging.getLogger(__name__)

# From this version on, NCCL allows several ranks on one GPU if this variable is 1.
_SHARED_GPU_VERSION = 23000
_SHARED_GPU_ENV = "NCCL_MULTI_RANK_GPU_ENABLE"
_CONNECT_TIMEOUT = datetime.timedelta(minutes=2)
_UNSET = -(2**31)  # NCCL's value for "undefined"

# By process group and device: the latest communicator and its id. It lives as long as a transport uses it. All models
# over a group share one, just as they share torch's.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[str, _C.SharedNccl]]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _leave_all() -> None:
    """Models that are still alive now may never be destroyed, or only after the driver."""
    for by_device in list(_communicators.values()):
        for _, shared in by_device.values():
            shared.leave()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NcclPeer(Peer):
    size: int
    device: str = ""  # identifies the GPU
    version: int = 0  # NCCL's version, as 22907
    shares_gpu: bool  # NCCL is set to allow several ranks on one GPU
    shared: str  # id of the communicator that the rank's models already use; empty if there is none or it is broken
    host: str = ""  # identifies the host
    nvls: bool = False  # NCCL may use NVLink SHARP here
    sharp: bool = False  # and SHARP of the network

    @classmethod
    def of_this_rank(cls, process_group: dist.ProcessGroup, device: torch.device, shared: str) -> NcclPeer:
        """Describe this rank. Never raises: an error becomes the problem."""
        own = cls(
            size=process_group.size(),
            shares_gpu=os.environ.get(_SHARED_GPU_ENV) == "1",
            shared=shared,
            host=host_of(process_group.rank()),
        )
        try:
            if (versions := _C.nccl_versions()) is None:
                raise RuntimeError("this torchddp was built without CUDA")
            if unfit := _C.nccl_version_problem(*versions):
                raise RuntimeError(unfit)
            bound = getattr(process_group, "bound_device_id", None)
            if bound is not None and bound.index is not None and bound.index != _index_of(device):
                raise ValueError(f"the process group is bound to {bound}, but the model is on {device}")
            return dataclasses.replace(
                own,
                version=versions[0],
                device=_C.device_identity(_index_of(device)),
                nvls=may_use_nvls(_torch.has_multicast(_index_of(device))),
                sharp=may_use_sharp(options_of(process_group, device)["settings"]),
            )
        except (RuntimeError, ValueError) as error:
            return dataclasses.replace(own, problem=str(error))


def options_of(process_group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Those of the group's own NCCL backend, if it has one, for `_C.NcclTransport`; settings by torch's names, without
    unset ones. RuntimeError for one that our communicator doesn't support.
    """
    options = getattr(backend_of(process_group, device.type), "options", None)
    config = getattr(options, "config", None)
    values: dict[str, Any] = {name: getattr(config, name) for name in dir(config) if not name.startswith("_")}
    wanted = {k: v for k, v in values.items() if isinstance(v, int | str) and v not in (_UNSET, "")}
    if getattr(process_group, "bound_device_id", None) is not None:
        wanted.pop("blocking", None)  # torch sets it itself in that case
    for name in sorted(wanted.keys() - set(_C.nccl_settings())):
        raise RuntimeError(
            f"the process group's NCCL options have {name}={wanted[name]!r}, which this torchddp can't set: build "
            "it with a newer NCCL, or leave the option unset"
        )
    return {
        "settings": {name: int(value) for name, value in wanted.items() if name != "net_name"},
        "net_name": str(wanted.get("net_name", "")),
        "high_priority": bool(getattr(options, "is_high_priority_stream", False)),
    }


def reason_against(peers: Sequence[NcclPeer]) -> str:
    """Why these ranks can't create a communicator, the same on all of them; or empty."""
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
                f"ranks {other} and {rank} are on the same GPU ({peer.device}); NCCL allows one rank per GPU (several "
                f"from 2.30 on, with {_SHARED_GPU_ENV}=1; this is {_text(peer.version)})"
            )
    return ""


def choice_of(peers: Sequence[NcclPeer]) -> NcclChoice:
    """How these ranks reduce large gradients, the same on all of them."""
    has_own_gpus = len({peer.device for peer in peers}) == len(peers)
    return choose(
        list(Counter(peer.host for peer in peers).values()),
        nvls=has_own_gpus and all(peer.nvls for peer in peers),
        sharp=all(peer.sharp for peer in peers),
    )


def connect(
    process_group: dist.ProcessGroup,
    device: torch.device,
    timeout: datetime.timedelta,
    exchange: StoreExchange | None = None,
) -> _C.NcclTransport | str:
    """Collective. Return a transport on every rank, or the same reason for failure on every rank.

    All models on one device over one process group share a communicator. `interrupt` on one model's transport ends it
    for all, and the next model gets a new one. ``timeout``: the limit for an operation: for NCCL's call, which may have
    to connect to the other ranks, and then for the operation once the device reaches it. ``exchange``: None: through
    the group's store.
    """
    rank, size, index = process_group.rank(), process_group.size(), _index_of(device)
    if exchange is None:
        # A rank may take as long to prepare its message as to connect.
        exchange = StoreExchange(part_of_store(process_group, "nccl"), rank, size, 2 * _CONNECT_TIMEOUT, "NCCL setup")
    communicators = _communicators.setdefault(process_group, {})
    shared_id, shared = communicators.get(index, ("", None))
    at_hand = None if shared is None else shared.open(timeout)  # kept until all ranks have reported

    def join(peers: Sequence[NcclPeer]) -> _C.NcclTransport:
        if at_hand is not None and all(peer.shared == shared_id for peer in peers):
            return at_hand
        own_id, problem = _new_id() if rank == 0 else ("", "")
        of_root = exchange.gather([own_id, problem])[0]
        if of_root[1]:
            raise RuntimeError(of_root[1])
        options = options_of(process_group, device)
        choice = choice_of(peers)
        if is_first_in_job(f"over NCCL: {choice}", process_group):
            logger.info("torchddp over NCCL %s %s", _text(peers[0].version), choice)
        made = _C.NcclTransport(
            bytes.fromhex(of_root[0]),
            rank=rank,
            size=size,
            device_index=index,
            sums_in_place=choice.in_place,
            connect_timeout=_CONNECT_TIMEOUT,
            timeout=timeout,
            **options,
        )
        communicators[index] = of_root[0], made.shared
        return made

    own = NcclPeer.of_this_rank(process_group, device, "" if at_hand is None else shared_id)
    return connect_all(exchange, own, reason_against, join)


def _new_id() -> tuple[str, str]:
    """A new communicator id, or why there is none."""
    try:
        return _C.make_nccl_id().hex(), ""
    except RuntimeError as error:
        return "", f"no id from rank 0: {error}"


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _text(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
